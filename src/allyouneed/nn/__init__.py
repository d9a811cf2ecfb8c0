"""The parts, one folder per slot. Defining a part registers it; a config that names its kind imports it."""

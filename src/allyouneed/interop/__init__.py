"""Other people's models: one small table per family says how their config and their weight names become ours."""

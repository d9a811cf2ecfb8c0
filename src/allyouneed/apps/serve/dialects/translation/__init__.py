"""The APIs of translation services, over one function (service.py)."""

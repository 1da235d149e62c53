"""The groups of settings: frozen dataclasses whose fields have a doc and bounds (setting.py)."""

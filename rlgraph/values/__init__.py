"""Settings and values that every layer names: they import errors and settings alone."""

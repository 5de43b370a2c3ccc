"""The benchmark of saves, beside all rivals and the limits of the machine."""

"""Every family tried against its reference on the device at hand."""

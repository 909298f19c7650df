"""Between the device and host memory: lines and pages of the pool become bytes of the canonical layout, and back."""

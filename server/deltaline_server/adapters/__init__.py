"""Adapters' files as PEFT writes them: checked, read, kept on the host, copied to the device."""

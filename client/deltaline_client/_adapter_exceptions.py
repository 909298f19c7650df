"""The errors of adapters, each in its family of `_exceptions`."""

from __future__ import annotations

from deltaline_client._exceptions import CapacityError, ConflictError, RequestError


class InvalidAdapter(RequestError):
    """The adapter's name or its files can't be taken; the message names the key or the tensor."""

    reason = "INVALID_ADAPTER"


class AdapterUnknown(RequestError):
    """No adapter has this name (any more)."""

    reason = "ADAPTER_UNKNOWN"


class AdapterBytesExhausted(CapacityError):
    """The adapters in use leave too little memory for another."""

    reason = "ADAPTER_BYTES_EXHAUSTED"


class UploadTimeout(CapacityError):
    """The bytes of an adapter did not reach the server in time."""

    reason = "UPLOAD_TIMEOUT"


class AdapterExists(ConflictError):
    """The name has an adapter with other content."""

    reason = "ADAPTER_EXISTS"


class AdapterInUse(ConflictError):
    """Sequences use the adapter."""

    reason = "ADAPTER_IN_USE"


class AdaptersOff(ConflictError):
    """The server holds no adapters, or has no folder of them."""

    reason = "ADAPTERS_OFF"

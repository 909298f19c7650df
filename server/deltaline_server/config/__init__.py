"""Every setting: options by theme, each with what it takes, read from command line, environment and file into one
`Config`."""

from deltaline_server.config.config import Config, unknown_variables
from deltaline_server.config.option import ConfigError, flag, kind_of, shown
from deltaline_server.config.sources import MAX_CONFIG_BYTES, asked_log_format

__all__ = [
    "MAX_CONFIG_BYTES",
    "Config",
    "ConfigError",
    "asked_log_format",
    "flag",
    "kind_of",
    "shown",
    "unknown_variables",
]

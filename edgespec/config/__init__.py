"""Configuration: one YAML file a role, checked before anything is loaded.

Precedence: command line, then ``EDGESPEC_*`` variables, then the file, then the defaults here.
"""

from edgespec.config.common import DEFAULT_ADDRESS, DEFAULT_PORT, DeviceTlsSection, ServerTlsSection
from edgespec.config.device import (
    AgentConfig,
    DraftSection,
    EndpointSection,
    LinkSection,
    PolicySection,
)
from edgespec.config.loading import ConfigError, dump_config, load_config
from edgespec.config.verifier import LimitsSection, PacingSection, VerifierConfig
from edgespec.core.device.goodput_policy import PolicyName

__all__ = [
    "DEFAULT_ADDRESS",
    "DEFAULT_PORT",
    "AgentConfig",
    "ConfigError",
    "DeviceTlsSection",
    "DraftSection",
    "EndpointSection",
    "LimitsSection",
    "LinkSection",
    "PacingSection",
    "PolicyName",
    "PolicySection",
    "ServerTlsSection",
    "VerifierConfig",
    "dump_config",
    "load_config",
]

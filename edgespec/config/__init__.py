"""Configuration of a device and of a verifier: one YAML file each, checked at once.

The command line wins over ``EDGESPEC_*`` variables, these win over the file, and the file wins over
the defaults in this package.
"""

from edgespec.config.common import DEFAULT_ADDRESS as DEFAULT_ADDRESS
from edgespec.config.common import DEFAULT_PORT as DEFAULT_PORT
from edgespec.config.common import DeviceTlsSection as DeviceTlsSection
from edgespec.config.common import ServerTlsSection as ServerTlsSection
from edgespec.config.device import AgentConfig as AgentConfig
from edgespec.config.device import DraftSection as DraftSection
from edgespec.config.device import EndpointSection as EndpointSection
from edgespec.config.device import LinkSection as LinkSection
from edgespec.config.device import PolicySection as PolicySection
from edgespec.config.loading import ConfigError as ConfigError
from edgespec.config.loading import dump_config as dump_config
from edgespec.config.loading import load_config as load_config
from edgespec.config.verifier import LimitsSection as LimitsSection
from edgespec.config.verifier import PacingSection as PacingSection
from edgespec.config.verifier import VerifierConfig as VerifierConfig
from edgespec.core.device.goodput_policy import PolicyName as PolicyName

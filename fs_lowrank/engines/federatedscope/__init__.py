"""The plug-in for FederatedScope: importing this package registers our methods, models, data and trainers there.

    import fs_lowrank.engines.federatedscope      # in your own launcher, before federatedscope.main
    python -m fs_lowrank.engines.federatedscope --cfg FILE [key value …]      # or with this package's launcher

``federate.method: rolora`` then runs RoLoRA, standalone or distributed. No file of the framework is changed. The
framework may have been imported before.

Raises (on import):
    UserError: the framework is not found, incomplete, damaged or another version, or lacks packages; see
        ``locate_federatedscope``.
"""

from .. import locate_federatedscope
from . import compat

FRAMEWORK = locate_federatedscope.require()
compat.mend()

from .registration import register_all  # noqa: E402

register_all()

"""The plug-in for FederatedScope: importing this package registers our methods, models, data and trainers there.

    import fs_lowrank.engines.federatedscope      # in your own launcher, before federatedscope.main
    python -m fs_lowrank.engines.federatedscope --cfg FILE [key value …]      # or with ours

``federate.method: rolora`` then runs RoLoRA, standalone or distributed. No file of the framework is changed.
Importing twice, or after the framework has built its configuration, is the same as importing first.

Raises (on import):
    UserError: the framework is not found, another version, not whole, or lacks packages; see ``locate``.
"""

from . import compat, locate

FRAMEWORK = locate.require()
compat.mend(compat.MENDS, FRAMEWORK)

from .registration import register_all  # noqa: E402

register_all()

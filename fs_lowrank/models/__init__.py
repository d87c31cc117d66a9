"""Models by name or path, the adapters on them, and the names of their tensors."""

import logging

# PEFT imports bitsandbytes where it is installed, which then says that it has no kernels from a hub, and for each
# product of 8 bits to what the inputs are cast.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

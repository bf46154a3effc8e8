"""The paper's mathematics and the masked BatchNorm.

Start with `functional.py`, the equations. `masks.py` computes the masks of all sites in one vector, `layout.py` maps
between vectors of channels and BatchNorms, and `batchnorm.py` is the BatchNorm that applies the masks.
"""

from softprune.mask_config import MaskConfig as MaskConfig
from softprune.masks.batchnorm import Folded as Folded
from softprune.masks.batchnorm import MaskedBatchNorm as MaskedBatchNorm
from softprune.masks.batchnorm import is_masked as is_masked
from softprune.masks.masks import Chain as Chain
from softprune.masks.masks import HookOwner as HookOwner
from softprune.masks.masks import Masks as Masks
from softprune.masks.masks import SoftMasks as SoftMasks
from softprune.masks.masks import StoredMasks as StoredMasks
from softprune.masks.masks import check_unmasked as check_unmasked
from softprune.masks.masks import draw_chain as draw_chain
from softprune.masks.masks import hook_root_ as hook_root_
from softprune.masks.masks import mask_sites_ as mask_sites_
from softprune.masks.masks import unmask_model_ as unmask_model_

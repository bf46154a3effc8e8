"""The paper's mathematics and the masked BatchNorm.

Read `functional.py` first, the equations. A gate (`gates.py`) decides about the channels of one BatchNorm, which
`batchnorm.py` masks, and `sampling.py` draws the masks of a whole model at once.
"""

from softprune.mask_config import MaskConfig as MaskConfig
from softprune.masks.activations import dead_edges as dead_edges
from softprune.masks.batchnorm import MaskedBatchNorm as MaskedBatchNorm
from softprune.masks.batchnorm import is_masked as is_masked
from softprune.masks.batchnorm import mask_ as mask_
from softprune.masks.batchnorm import mask_group_ as mask_group_
from softprune.masks.batchnorm import unmask_ as unmask_
from softprune.masks.functional import alive_probability as alive_probability
from softprune.masks.functional import dead_probability as dead_probability
from softprune.masks.functional import drop_probability as drop_probability
from softprune.masks.functional import hard_mask as hard_mask
from softprune.masks.functional import relaxed_sample as relaxed_sample
from softprune.masks.functional import sparsity_loss as sparsity_loss
from softprune.masks.functional import sparsity_terms as sparsity_terms
from softprune.masks.gates import AffineGate as AffineGate
from softprune.masks.gates import FixedGate as FixedGate
from softprune.masks.gates import Gate as Gate
from softprune.masks.gates import MaskDecision as MaskDecision
from softprune.masks.gates import SoftGate as SoftGate
from softprune.masks.gates import fill_to_multiple as fill_to_multiple
from softprune.masks.sampling import Chain as Chain
from softprune.masks.sampling import HookOwner as HookOwner
from softprune.masks.sampling import MaskBank as MaskBank
from softprune.masks.sampling import check_unmasked as check_unmasked
from softprune.masks.sampling import draw_chain as draw_chain
from softprune.masks.sites import norms_of as norms_of
from softprune.masks.sites import site_affine as site_affine
from softprune.rng import Clock as Clock
from softprune.rng import channel_words as channel_words
from softprune.rng import logistic_noise as logistic_noise
from softprune.rng import uniform_noise as uniform_noise

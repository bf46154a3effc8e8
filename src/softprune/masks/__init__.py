"""The paper's mathematics and the masked BatchNorm."""

from softprune.masks.activations import KNOWN_ACTIVATIONS as KNOWN_ACTIVATIONS
from softprune.masks.activations import dead_edges as dead_edges
from softprune.masks.bank import MaskBank as MaskBank
from softprune.masks.batchnorm import MaskedBatchNorm as MaskedBatchNorm
from softprune.masks.batchnorm import can_mask as can_mask
from softprune.masks.batchnorm import is_masked as is_masked
from softprune.masks.batchnorm import mask_ as mask_
from softprune.masks.batchnorm import unmask_ as unmask_
from softprune.masks.config import MaskConfig as MaskConfig
from softprune.masks.functional import alive_probability as alive_probability
from softprune.masks.functional import dead_probability as dead_probability
from softprune.masks.functional import drop_probability as drop_probability
from softprune.masks.functional import hard_mask as hard_mask
from softprune.masks.functional import relaxed_sample as relaxed_sample
from softprune.masks.functional import sparsity_loss as sparsity_loss
from softprune.masks.functional import sparsity_terms as sparsity_terms
from softprune.masks.gate import AffineGate as AffineGate
from softprune.masks.gate import FixedGate as FixedGate
from softprune.masks.gate import Gate as Gate
from softprune.masks.gate import Settlement as Settlement
from softprune.masks.gate import SoftGate as SoftGate
from softprune.masks.gate import round_up as round_up
from softprune.masks.noise import Clock as Clock
from softprune.masks.noise import channel_words as channel_words
from softprune.masks.noise import logistic_noise as logistic_noise
from softprune.masks.noise import uniform_noise as uniform_noise

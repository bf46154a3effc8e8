"""Pruning methods: each usable in a plain PyTorch loop, and by name through the registry."""

from softprune.methods.base import Pruner
from softprune.methods.registry import REGISTRY, Method
from softprune.methods.scp import SoftPruner
from softprune.methods.summary import SiteSummary, Summary

__all__ = ["REGISTRY", "Method", "Pruner", "SiteSummary", "SoftPruner", "Summary"]

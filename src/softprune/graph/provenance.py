"""From nodes of the captured graph to the model's modules and parameters."""

from typing import Any

from torch import Tensor, nn
from torch.fx import Node

from softprune.graph.capture import Capture


class Provenance:
    """Which module of the captured model ran a node, and which module owns a parameter."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.capture: Capture | None = None
        """The capture whose nodes are asked about."""
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._first_names = {id(module): name for name, module in model.named_modules()}
        self._owners: dict[int, str] = {}
        """id(parameter) of weights that are cut -> name of the record that cuts it."""

    def parameter_name(self, node: Any) -> str | None:
        """Return the name of the parameter or buffer that `node` is, or None."""
        assert self.capture is not None
        return self.capture.parameters.get(node.name) if isinstance(node, Node) else None

    def tensor(self, name: str) -> Tensor:
        """Return a parameter or buffer of the model by name."""
        path, _, attribute = name.rpartition(".")
        return getattr(self._modules[path], attribute)

    def has_tensor(self, name: str) -> bool:
        """Whether `name` is a parameter or buffer, and no tensor that forward() makes."""
        path, _, attribute = name.rpartition(".")
        module = self._modules.get(path)
        return module is not None and (attribute in module._parameters or attribute in module._buffers)

    def module(self, name: str) -> nn.Module:
        """Return a module by its name in the captured graph; the model itself where it has no such module."""
        return self._modules.get(name, self.model)

    def module_of(self, node: Node) -> tuple[str, str]:
        """Return (call key, module name) of the innermost module whose forward ran `node`."""
        stack = node.meta.get("nn_module_stack") or {}
        if not stack:
            return "", ""
        key, (name, _) = list(stack.items())[-1]
        return key, self._first_name(name)

    def owner(self, node: Node, weight: Any, bias: Node | None) -> tuple[str, bool] | None:
        """Return (module that holds both parameters, whether `node` ran in that module's own forward)."""
        if weight is None:  # an InstanceNorm mostly has no parameters
            return self.module_of(node)[1], True
        name = self.parameter_name(weight)
        if name is None or not self.has_tensor(name):
            return None
        tensor = self.tensor(name)
        bias_name = self.parameter_name(bias)
        if bias is not None and (bias_name is None or not self.has_tensor(bias_name)):
            return None
        shift = None if bias_name is None else self.tensor(bias_name)
        _, innermost = self.module_of(node)
        # By identity: a tied weight is captured under the name of its first owner.
        for owner, called in ((innermost, True), (self._first_name(name.rpartition(".")[0]), False)):
            module = self.module(owner)
            own = (getattr(module, "weight", None), getattr(module, "running_mean", None))
            if any(tensor is mine for mine in own) and getattr(module, "bias", None) is shift:
                return owner, called
        return None

    def claim(self, weight: Node | None, bias: Node | None, name: str) -> str:
        """Let module `name` cut these parameters, unless a module with the same weight does; return who does."""
        if weight is None:
            return name
        owner = self._owners.setdefault(id(self.tensor(self.parameter_name(weight) or "")), name)
        if bias is not None:
            self._owners.setdefault(id(self.tensor(self.parameter_name(bias) or "")), owner)
        return owner

    def claimant(self, name: str) -> str:
        """Return the module that cuts the parameter `name`; empty where none does."""
        return self._owners.get(id(self.tensor(name)), "")

    def is_only_owner(self, name: str) -> bool:
        """Whether no other module holds a parameter of the module `name`."""
        own = {id(parameter) for parameter in self.module(name).parameters(recurse=False)}
        others = (module for module in self.model.modules() if module is not self.module(name))
        return not any(id(parameter) in own for other in others for parameter in other.parameters(recurse=False))

    def reads_inside(self, node: Node) -> bool:
        """Whether the operator's input was computed within the same call of its module."""
        key, _ = self.module_of(node)
        source = node.args[0]
        stack = source.meta.get("nn_module_stack") if isinstance(source, Node) else None
        return bool(stack) and key in stack  # type: ignore[operator]

    def _first_name(self, name: str) -> str:
        """Return the first of the names under which a module is registered."""
        return self._first_names.get(id(self.module(name)), name)

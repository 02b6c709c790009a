"""TorchRL: all worlds and agents as one batched EnvBase."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torchrl.data import Binary, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase

from hamlet.town.adapters.flat import flat_observation, flat_size
from hamlet.town.load import load_pack
from hamlet.town.town import Town


class TownTorchRLEnv(EnvBase):
    """`num_worlds` worlds, batch [B]: observation f32 [B, N, D], action_mask bool [B, N, A],
    action int64 [B, N], reward f32 [B, N, 1], done bool [B, 1] when all agents of a world are.
    """

    def __init__(
        self, num_worlds: int = 1, pack: str = "l4_contention", layout_seed: int = 0,
        device: str = "cpu",
    ):  # fmt: skip
        super().__init__(device=device, batch_size=[num_worlds])
        self.town = town = Town(load_pack(pack), layout_seed=layout_seed, device=device)
        b, n, a = num_worlds, town.num_agents, town.num_actions
        self.observation_spec = Composite(
            observation=Unbounded((b, n, flat_size(town)), device=device),
            action_mask=Binary(a, (b, n, a), dtype=torch.bool, device=device),
            shape=(b,),
            device=device,
        )
        self.action_spec = Categorical(a, (b, n), dtype=torch.int64, device=device)
        self.reward_spec = Unbounded((b, n, 1), device=device)
        self._seed = 0
        self._state = town.reset(0, b)

    def _reset(self, tensordict: TensorDict | None = None, **_: object) -> TensorDict:
        if tensordict is not None and "_reset" in tensordict.keys():  # noqa: SIM118
            self._state = self.town.renew(self._state, tensordict["_reset"].flatten())
        else:
            self._seed = (self._seed * 1_103_515_245 + 12_345) % 2**31
            self._state = self.town.reset(self._seed, self.batch_size[0])
        return self._read()

    def _step(self, tensordict: TensorDict) -> TensorDict:
        self._state = self.town.step_core(self._state, tensordict["action"])
        out = self._read()
        out["reward"] = self._state["reward"][..., None].contiguous()
        out["done"] = self._state["episode_over"][:, None].clone()
        out["terminated"] = out["done"].clone()
        return out

    def _read(self) -> TensorDict:
        observation = flat_observation(self.town, self.town.observe(self._state))
        mask = self.town.action_mask(self._state).contiguous()
        return TensorDict({"observation": observation, "action_mask": mask}, self.batch_size)

    def _set_seed(self, seed: int | None) -> None:
        self._seed = 0 if seed is None else int(seed)

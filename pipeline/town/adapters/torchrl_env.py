"""TorchRL: all worlds and agents as one batched EnvBase, agents in the group "agents"."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torchrl.data import Binary, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase

from hamlet.town.adapters.flat import flat_observation, flat_size, state_size, true_state
from hamlet.town.adapters.requests import checked_actions, checked_seed
from hamlet.town.load import load_pack
from hamlet.town.town import Town

GROUP = "agents"


class TownTorchRLEnv(EnvBase):
    """`num_worlds` worlds, batch [B], in TorchRL's form for many agents.

    Under "agents": observation f32 [B, N, D], action_mask bool [B, N, A], mask bool [B, N] (who
    lives), action int64 [B, N], reward f32 [B, N, 1], and terminated (dead), truncated (at the
    lifespan) and done, bool [B, N, 1], true from the end of an agent to that of its world.
    At the root: state f32 [B, S] (see `flat.true_state`); done bool [B, 1] when all agents of a
    world have ended, truncated if some of them reached the lifespan, else terminated.
    A world is reset as a whole, by `_reset` at the root.

    Raises:
        HamletError: a pack or seed that does not exist, an action out of range.
    """

    def __init__(
        self, num_worlds: int = 1, pack: str = "l4_contention", layout_seed: int = 0,
        device: str = "cpu",
    ):  # fmt: skip
        # A dead agent is done before and after what TorchRL calls its reset: its world goes on.
        super().__init__(device=device, batch_size=[num_worlds], allow_done_after_reset=True)
        self.town = town = Town(load_pack(pack), layout_seed=layout_seed, device=device)
        b, n, a = num_worlds, town.num_agents, town.num_actions

        def grouped(**specs: object) -> Composite:
            return Composite(specs, shape=(b, n), device=device)

        def flags(*shape: int) -> dict[str, Categorical]:
            names = ("done", "terminated", "truncated")
            return {m: Categorical(2, shape, dtype=torch.bool, device=device) for m in names}

        seen = grouped(
            observation=Unbounded((b, n, flat_size(town)), device=device),
            action_mask=Binary(a, (b, n, a), dtype=torch.bool, device=device),
            mask=Binary(n, (b, n), dtype=torch.bool, device=device),
        )
        self.observation_spec = Composite(
            {GROUP: seen, "state": Unbounded((b, state_size(town)), device=device)},
            shape=(b,), device=device,
        )  # fmt: skip
        action = Categorical(a, (b, n), dtype=torch.int64, device=device)
        self.action_spec = Composite({GROUP: grouped(action=action)}, shape=(b,), device=device)
        reward = Unbounded((b, n, 1), device=device)
        self.reward_spec = Composite({GROUP: grouped(reward=reward)}, shape=(b,), device=device)
        self.done_spec = Composite(
            {GROUP: grouped(**flags(b, n, 1)), **flags(b, 1)}, shape=(b,), device=device
        )
        self._seed = 0
        self._state = town.reset(0, b)

    def _reset(self, tensordict: TensorDict | None = None, **_: object) -> TensorDict:
        asked = () if tensordict is None else tensordict.keys(include_nested=True)
        if tensordict is not None and "_reset" in asked:
            self._state = self.town.renew(self._state, tensordict["_reset"].flatten())
        elif (GROUP, "_reset") not in asked:
            self._seed = (self._seed * 1_103_515_245 + 12_345) % 2**31
            self._state = self.town.reset(self._seed, self.batch_size[0])
        return self._read()

    def _step(self, tensordict: TensorDict) -> TensorDict:
        shape = (self.batch_size[0], self.town.num_agents)
        actions = checked_actions(tensordict[GROUP, "action"], shape, self.town.action_names)
        self._state = self.town.step_core(self._state, actions.to(self.town.device))
        out = self._read()
        out[GROUP, "reward"] = self._state["reward"][..., None].contiguous()
        return out

    def _read(self) -> TensorDict:
        """What is seen and who has ended."""
        s, b = self._state, self.batch_size[0]
        dead, over = ~s["alive"], s["over"][:, None]
        aged = over & ~dead  # the world ends for the living by age alone
        ends = {"terminated": dead, "truncated": aged, "done": dead | aged}
        agents = {
            "observation": flat_observation(self.town, self.town.observe(s)),
            "action_mask": self.town.action_mask(s).contiguous(),
            "mask": s["alive"].contiguous(),
            **{name: end[..., None].contiguous() for name, end in ends.items()},
        }
        some = aged.any(1, keepdim=True)
        return TensorDict(
            {
                GROUP: TensorDict(agents, (b, self.town.num_agents)),
                "state": true_state(self.town, s),
                "done": over.clone(),
                "terminated": over & ~some,
                "truncated": over & some,
            },
            self.batch_size,
        )

    def _set_seed(self, seed: int | None) -> None:
        self._seed = 0 if seed is None else checked_seed(seed)

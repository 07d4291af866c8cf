"""A worker of vLLM 0.33 that shares its GPU: the engine argument `worker_cls="one_gpu.Worker"` (jobs.py) runs all ranks on the first GPU.

NCCL refuses two ranks on a GPU. So their tensors go through the host, by gloo. CUDA graphs cannot capture that: engines run eager only."""

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.platforms import current_platform
from vllm.v1.worker import gpu_worker


class Communicator(DeviceCommunicatorBase):
    """What tensor and decode context parallelism call. Sums in float32, because gloo rounds a sum of float16 after each rank's part."""

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        total = input_.float().cpu()
        dist.all_reduce(total, group=self.cpu_group)
        return total.to(input_)

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        own = input_.contiguous().cpu()
        parts = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(parts, own, group=self.cpu_group)
        return torch.cat(parts, dim).to(input_.device)

    def reduce_scatter(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return self.all_reduce(input_).chunk(self.world_size, dim)[self.rank_in_group].contiguous()


def _all_to_all_single(output: torch.Tensor, input_: torch.Tensor, *, group: dist.ProcessGroup, async_op: bool):
    """Replaces PyTorch's in vLLM's dcp_a2a_lse_reduce, which passes async_op=True and waits for the returned work."""
    received = torch.empty_like(output, device="cpu")
    work = dist.distributed_c10d.all_to_all_single(received, input_.cpu(), group=group, async_op=async_op)
    if work is not None:  # None without async_op, when it has ended
        work.wait()
    output.copy_(received)
    return work


class Worker(gpu_worker.Worker):
    def init_device(self) -> None:
        """Takes the first GPU, and gloo in place of NCCL."""
        self.parallel_config.get_local_gpu_index = lambda *_: 0
        platform = type(current_platform)
        platform.dist_backend = "gloo"
        platform.get_device_communicator_cls = classmethod(lambda cls: "one_gpu.Communicator")
        dist.all_to_all_single = _all_to_all_single
        super().init_device()

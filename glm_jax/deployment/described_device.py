"""A described H200: what a program is lowered for where there is none."""

from pathlib import Path

import jax
from jax.experimental import topologies

TARGET = Path(__file__).with_name("h200.txtpb")


def described_device() -> jax.sharding.NamedSharding:
    """Where arrays of one described H200 live.

    Raises:
        RuntimeError: JAX's CUDA plugin is not installed.
    """
    # A default backend is needed for constants; it must not be a GPU that happens to be there.
    jax.config.update("jax_platforms", "cpu")
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=TARGET.read_text(), topology="1x1x1"
        )
    except Exception as error:  # jaxlib raises its own errors, of several types
        raise RuntimeError(
            "no compiler for CUDA: install the wheels jax-cuda13-plugin and jax-cuda13-pjrt of "
            f"jax's own version ({jax.__version__}), with --no-deps. JAX says: {error}"
        ) from error
    mesh = topologies.make_mesh(topology, (1,), ("rank",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

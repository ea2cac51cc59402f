"""The ``glm-jax plan`` command: what a deployment on several GPUs takes, before there is one."""

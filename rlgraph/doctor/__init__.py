"""What this machine can run: versions, devices, limits and the sandbox, each problem with its fix."""

"""JAX: compiled functions, a gradient and linear algebra, as hashes to compare."""
import jax, jax.numpy as jnp, hashlib, numpy as np
h=lambda x: hashlib.sha1(np.asarray(x).tobytes()).hexdigest()[:16]
f=jax.jit(lambda a,b: (jnp.sin(a)@b).sum()); g=jax.grad(lambda a,b:f(a,b))
k=jax.random.PRNGKey(0); a=jax.random.normal(k,(512,512))
print(f(a,a), h(g(a,a))); print(h(jnp.linalg.svd(a)[1]), h(jnp.fft.fft(a)), jax.devices()[0].device_kind)

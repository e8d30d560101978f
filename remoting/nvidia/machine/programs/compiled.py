"""JAX, and what is compiled from Python for it."""
import jax
import jax.numpy as jnp
from digest import run, show


def perceptron():
    import optax

    key = jax.random.key(0)
    weights = {"a": jax.random.normal(key, (64, 128)) / 8, "b": jax.random.normal(key, (128, 10)) / 11}
    x, y = jax.random.normal(key, (256, 64)), jnp.arange(256) % 10
    optimizer = optax.adam(1e-2)
    state = optimizer.init(weights)

    def loss(weights):
        scores = jax.nn.relu(x @ weights["a"]) @ weights["b"]
        return optax.softmax_cross_entropy_with_integer_labels(scores, y).mean()

    @jax.jit
    def step(weights, state):
        value, gradient = jax.value_and_grad(loss)(weights)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(weights, updates), state, value

    for _ in range(10):
        weights, state, value = step(weights, state)
        print(f"loss {float(value):.8f}")
    show("weights", *weights.values())


def loops():
    def body(carry, x):
        return carry * 0.9 + x, carry.sum()

    show("scan", *jax.lax.scan(body, jnp.zeros(100), jax.random.normal(jax.random.key(1), (500, 100))))
    show("while", jax.lax.while_loop(lambda c: c[0] < 100, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, jnp.ones(50)))[1])
    show("map", jax.vmap(jax.vmap(lambda a, b: a * b + 1, (0, None)), (None, 0))(jnp.arange(30.0), jnp.arange(20.0)))
    show("sort", *jax.lax.sort((jax.random.normal(jax.random.key(2), (5000,)), jnp.arange(5000)), num_keys=1))


def convolution():
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Conv(3, 16, (3, 3), rngs=rngs)
            self.second = nnx.Conv(16, 32, (3, 3), strides=2, rngs=rngs)
            self.last = nnx.Linear(32, 10, rngs=rngs)

        def __call__(self, x):
            return self.last(nnx.relu(self.second(nnx.relu(self.first(x)))).mean((1, 2)))

    net = Net(nnx.Rngs(0))
    images = jax.random.normal(jax.random.key(3), (8, 32, 32, 3))
    loss, gradient = nnx.jit(nnx.value_and_grad(lambda net: jnp.square(net(images)).mean()))(net)
    print(f"loss {float(loss):.7f}")
    show("gradient", *jax.tree.leaves(gradient))


def attention():
    q, k, v = jax.random.normal(jax.random.key(4), (3, 2, 128, 4, 64), jnp.bfloat16)
    for name in ("xla", "cudnn"):
        show(name, jax.jit(lambda *a: jax.nn.dot_product_attention(*a, implementation=name))(q, k, v).astype(jnp.float32))


def pallas():
    from jax.experimental import pallas

    def add(x, y, out):
        out[...] = x[...] * 2 + y[...]

    x = jnp.arange(1024.0)
    call = pallas.pallas_call(add, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), grid=(8,),
                              in_specs=[pallas.BlockSpec((128,), lambda i: (i,))] * 2,
                              out_specs=pallas.BlockSpec((128,), lambda i: (i,)))
    show("pallas", jax.jit(call)(x, x))


if __name__ == "__main__":
    run(globals())

"""A model of Llama's shape (1.1B parameters, random weights) by transformers: the tokens that it continues a
text with, and how many a second."""
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

# cuDNN is not served yet, and PyTorch prefers its attention.
torch.backends.cuda.enable_cudnn_sdp(False)
config = LlamaConfig(
    vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=22,
    num_attention_heads=32, num_key_value_heads=4, max_position_embeddings=2048)
torch.manual_seed(1)
torch.set_default_dtype(torch.bfloat16)
with torch.device("cuda"):
    model = LlamaForCausalLM(config).eval()
text = torch.randint(3, 32000, (1, 32)).to("cuda")
mask = torch.ones_like(text)
for new in (8, 64):
    start = time.perf_counter()
    tokens = model.generate(text, attention_mask=mask, min_new_tokens=new, max_new_tokens=new, do_sample=False,
                            pad_token_id=0)
    torch.cuda.synchronize()
    took = time.perf_counter() - start
for place, token in enumerate(tokens[0, 32:].tolist()):
    print("loss", place, token)
print(f"# {new / took:.1f} tokens a second")

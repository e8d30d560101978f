"""Models of transformers with random weights: text generated token by token, and others."""
import deterministic
import torch
import transformers
from digest import run, show

transformers.logging.set_verbosity_error()
SMALL = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 512}
PROMPT = torch.arange(1, 33).reshape(2, 16)


def generate(model, name, **options):
    model = model.cuda().eval()
    torch.manual_seed(2)
    with torch.inference_mode():
        tokens = model.generate(PROMPT.cuda(), attention_mask=torch.ones_like(PROMPT).cuda(), max_new_tokens=40,
                                min_new_tokens=40, pad_token_id=0, **options)
    show(name, tokens)


def gpt2():
    config = transformers.GPT2Config(vocab_size=1000, n_embd=256, n_layer=4, n_head=8)
    return transformers.GPT2LMHeadModel(config)


def gpt2_greedy():
    generate(gpt2(), "greedy", do_sample=False)


def gpt2_sampling():
    generate(gpt2(), "sampled", do_sample=True, top_k=50, temperature=0.8)


def llama():
    config = transformers.LlamaConfig(vocab_size=1000, num_key_value_heads=2, **SMALL)
    generate(transformers.LlamaForCausalLM(config).bfloat16(), "llama", do_sample=False)


def mixtral():
    config = transformers.MixtralConfig(vocab_size=1000, num_key_value_heads=2, num_local_experts=4, **SMALL)
    generate(transformers.MixtralForCausalLM(config), "mixtral", do_sample=False)


def t5():
    config = transformers.T5Config(vocab_size=1000, d_model=256, d_ff=512, num_layers=3, num_heads=4,
                                   decoder_start_token_id=0)
    generate(transformers.T5ForConditionalGeneration(config), "t5", do_sample=False)


def bert():
    model = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=1000, **SMALL)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 1000, (8, 64)).cuda()
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        print(f"loss {loss.item():.9f}")


def whisper():
    config = transformers.WhisperConfig(d_model=128, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
                                        decoder_attention_heads=4, encoder_ffn_dim=256, decoder_ffn_dim=256)
    model = transformers.WhisperForConditionalGeneration(config).cuda().eval()
    with torch.inference_mode():
        tokens = model.generate(torch.randn(1, 80, 3000).cuda(), max_new_tokens=20, min_new_tokens=20, do_sample=False)
    show("whisper", tokens)


if __name__ == "__main__":
    run(globals())

"""Convolutional networks."""
import deterministic
import torch
import torch.nn.functional as F
from digest import run, show


def steps(model, images, classes, count, kind=torch.float32):
    """Some steps of training: losses, and the last weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    targets = torch.arange(len(images), device="cuda") % classes
    for _ in range(count):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=kind, enabled=kind != torch.float32):
            loss = F.cross_entropy(model(images), targets)
        loss.backward()
        optimizer.step()
        print(f"loss {loss.item():.9f}")
    show("weights", *(weight for weight in model.parameters()))


def resnet50():
    import torchvision

    model = torchvision.models.resnet50(num_classes=10).cuda().to(memory_format=torch.channels_last)
    images = torch.randn(16, 3, 224, 224).cuda().to(memory_format=torch.channels_last)
    steps(model, images, 10, 5, torch.bfloat16)


def mobilenet():
    import torchvision

    model = torchvision.models.mobilenet_v3_large().cuda().half().eval()
    with torch.inference_mode():
        show("scores", model(torch.randn(32, 3, 224, 224).cuda().half()))


def shapes():
    """One to three dimensions, transposed, grouped, dilated: forward and backward."""
    cases = [
        (torch.nn.Conv1d(8, 16, 5, padding=2), (4, 8, 1000)),
        (torch.nn.Conv2d(16, 16, 3, groups=16, padding=1), (4, 16, 64, 64)),
        (torch.nn.Conv2d(16, 32, 3, dilation=3, stride=2), (4, 16, 64, 64)),
        (torch.nn.Conv3d(4, 8, 3, padding=1), (2, 4, 16, 32, 32)),
        (torch.nn.ConvTranspose2d(16, 8, 4, stride=2), (4, 16, 32, 32)),
        (torch.nn.ConvTranspose3d(4, 4, 2, stride=2), (2, 4, 8, 8, 8)),
    ]
    for layer, size in cases:
        layer = layer.cuda()
        given = torch.randn(size).cuda().requires_grad_()
        result = layer(given)
        result.square().sum().backward()
        show(type(layer).__name__, result, given.grad, layer.weight.grad)


def convnext():
    import timm

    model = timm.create_model("convnext_atto", pretrained=False, num_classes=10).cuda()
    steps(model, torch.randn(8, 3, 128, 128).cuda(), 10, 4)


if __name__ == "__main__":
    run(globals())

# # Ten minutes
#
# A private model of handwritten digits, and what its guarantee says. MNIST comes with the package. The code blocks are one program,
# `docs/tutorials/ten_minutes.py`; what stands below them is what it printed when this page was made.

# %%
import torch
import dpulr

train, test = dpulr.data.load("mnist")
print(len(train), "records to learn from,", len(test), "public ones to test on")

# The model is any torch module, the optimizer any torch optimizer. Neither is wrapped or changed. The loss has one value per record:
# that is what `reduction="none"` is for.

# %%
model = dpulr.models.mlp(seed=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9)
engine = dpulr.PrivacyEngine(
    model,
    optimizer,
    train,
    torch.nn.CrossEntropyLoss(reduction="none"),
    mechanism="gradient",
    batch_size=2_000,
    epochs=6,
    target_epsilon=1.0,
    target_delta=1e-6,
)
print(f"{engine.planned_steps} steps, noise multiplier {engine.noise_multiplier:.3f}")

# The engine has calibrated the noise so that all planned steps together stay within epsilon 1. It draws the batches, because the
# guarantee rests on how they are drawn. The loop is yours:

# %%
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=engine.planned_steps)
spent, accuracy = [], []
for epoch in engine.epochs():
    for x, y in epoch:
        engine.step(x, y)
        schedule.step()
    spent.append(engine.privacy_spent().epsilon)
    accuracy.append(dpulr.evaluate(model, test))
    print(f"epsilon {spent[-1]:.3f}   test accuracy {accuracy[-1]:.4f}")

# The test set is public, so it may be looked at as often as you like. Training losses are not shown: the guarantee would not cover them.
# The picture needs `pip install 'dpulr[pictures]'`.

# %%
import matplotlib.pyplot as plt

figure, axis = plt.subplots(figsize=(5, 3))
axis.plot(spent, accuracy, "o-")
axis.set(xlabel="epsilon spent", ylabel="test accuracy")
picture = "Test accuracy over the epsilon spent, epoch by epoch"

# What was promised, as a sentence that can be published:

# %%
print(engine.privacy_spent())

# The same by hidden directions, for models that can't be differentiated: each record adds secret random directions and one bit for each,
# whether the loss rose. No backward pass.

# %%
model = dpulr.models.mlp(seed=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9)
engine = dpulr.PrivacyEngine(
    model,
    optimizer,
    train,
    torch.nn.CrossEntropyLoss(reduction="none"),
    mechanism=dpulr.HiddenDirection(repeats=4),
    batch_size=2_000,
    epochs=3,
    target_epsilon=1.0,
    target_delta=1e-6,
)
for x, y in engine.batches():
    engine.step(x, y)
print(f"test accuracy {dpulr.evaluate(model, test):.4f}, epsilon {engine.privacy_spent().epsilon:.3f}")

# Next: [tables](../tables.md), [what to choose](../choose.md), [how to](../howto.md).

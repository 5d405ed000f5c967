"""Six tasks with state of the whole step, which docs/losses.md speaks of and tests train."""

import copy

import torch
from torch import nn
from torch.nn.functional import cross_entropy, log_softmax, mse_loss, normalize, one_hot, softmax
from torch.utils.data import TensorDataset

from lanewise import Loss, Task

NUM_SAMPLES = 53


def encoder():
    """Return a small network."""
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).double()


decoder = encoder


def vectors():
    """Return a vector for each sample."""
    generator = torch.Generator().manual_seed(3)
    return list(torch.randn(NUM_SAMPLES, 8, generator=generator, dtype=torch.float64))


def numbered():
    """Return a vector and its index for each sample."""
    return TensorDataset(torch.stack(vectors()), torch.arange(NUM_SAMPLES))


def views():
    """Return two views of each sample."""
    vectors = torch.randn(NUM_SAMPLES, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(vectors, vectors + 0.1 * vectors.flip(1))


def follow(teacher, student, decay):
    """Move the weights of a teacher towards those of its student."""
    for mine, theirs in zip(teacher.parameters(), student.parameters(), strict=True):
        mine.lerp_(theirs, 1 - decay)


class MoCo(Task):
    """A queue and a key encoder (MoCo)."""

    step_state = ("queue",)

    def build_model(self):
        model = nn.Module()
        model.query = encoder()
        model.key = copy.deepcopy(model.query).requires_grad_(False)
        model.register_buffer("queue", normalize(torch.randn(40, 8, dtype=torch.float64)))
        return model

    def train_dataset(self):
        return views()

    def forward(self, model, batch):
        first, second = batch
        queries = normalize(model.query(first))
        if not model.training:
            return queries
        with torch.no_grad():
            return queries, normalize(model.key(second)), model.queue

    def loss(self, outputs, batch):
        queries, keys, queue = outputs
        logits = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ queue.T], dim=1) / 0.2
        value = cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64, device=logits.device))
        return Loss.mean(value, len(queries), gather={"keys": keys})

    def after_update(self, model, step):
        follow(model.key, model.query, 0.99)
        model.queue.copy_(torch.cat([step.gathered["keys"], model.queue])[: len(model.queue)])


class Dino(Task):
    """A teacher and a centre (DINO)."""

    step_state = ("centre",)

    def build_model(self):
        model = nn.Module()
        model.student = encoder()
        model.teacher = copy.deepcopy(model.student).requires_grad_(False)
        model.register_buffer("centre", torch.zeros(8, dtype=torch.float64))
        return model

    def train_dataset(self):
        return views()

    def forward(self, model, batch):
        if not model.training:
            return model.teacher(batch[0])
        with torch.no_grad():
            taught = model.teacher(batch[1])
        return model.student(batch[0]), taught, softmax((taught - model.centre) / 0.04, dim=1)

    def loss(self, outputs, batch):
        learned, taught, targets = outputs
        value = -(targets * log_softmax(learned / 0.1, dim=1)).sum(dim=1).mean()
        return Loss.mean(value, len(learned), total={"taught": taught.sum(dim=0)})

    def after_update(self, model, step):
        follow(model.teacher, model.student, 0.99)
        model.centre.lerp_(step.totals["taught"] / step.num_samples, 0.1)


class Quantiser(Task):
    """A codebook by moving averages, with revival of dead codes (VQ-VAE)."""

    step_state = ("codes", "counts", "sums")

    def build_model(self):
        model = nn.Module()
        model.encoder, model.decoder = encoder(), decoder()
        model.register_buffer("codes", torch.randn(16, 8, dtype=torch.float64))
        model.register_buffer("counts", torch.ones(16, dtype=torch.float64))
        model.register_buffer("sums", model.codes.clone())
        return model

    def train_dataset(self):
        return vectors()

    def forward(self, model, batch):
        encoded = model.encoder(batch)
        nearest = torch.cdist(encoded, model.codes).argmin(dim=1)
        quantised = model.codes[nearest]
        return model.decoder(encoded + (quantised - encoded).detach()), encoded, quantised, nearest

    def loss(self, outputs, batch):
        decoded, encoded, quantised, nearest = outputs
        value = mse_loss(decoded, batch) + 0.25 * mse_loss(encoded, quantised)
        seen = encoded.detach().to(quantised.dtype)  # of the codes, also in bf16
        chosen = one_hot(nearest, 16).to(seen.dtype)
        total = {"counts": chosen.sum(dim=0), "sums": chosen.T @ seen}
        return Loss.mean(value, len(batch), gather={"seen": seen}, total=total)

    def after_update(self, model, step):
        model.counts.lerp_(step.totals["counts"], 0.1)
        model.sums.lerp_(step.totals["sums"], 0.1)
        dead, seen = model.counts < 0.3, step.gathered["seen"]
        drawn = torch.randint(len(seen), (16,))  # the same on every process
        model.sums[dead] = seen[drawn][dead]
        model.counts[dead] = 1.0
        model.codes.copy_(model.sums / model.counts[:, None])


class Experts(Task):
    """Experts that a bias balances."""

    step_state = ("bias",)

    def build_model(self):
        model = nn.Module()
        model.router = nn.Linear(8, 4).double()
        model.experts = nn.ModuleList(nn.Linear(8, 8).double() for _ in range(4))
        model.register_buffer("bias", torch.zeros(4, dtype=torch.float64))
        return model

    def train_dataset(self):
        return vectors()

    def forward(self, model, batch):
        scores = model.router(batch).sigmoid()
        chosen = (scores + model.bias).argmax(dim=1)  # the bias chooses, and weighs nothing
        every = torch.stack([expert(batch) for expert in model.experts], dim=1)
        rows = torch.arange(len(batch), device=batch.device)
        return scores[rows, chosen, None] * every[rows, chosen], chosen

    def loss(self, outputs, batch):
        decoded, chosen = outputs
        counts = chosen.bincount(minlength=4)
        return Loss.mean(mse_loss(decoded, batch), len(batch), total={"counts": counts})

    def after_update(self, model, step):
        counts = step.totals["counts"].double()
        model.bias.add_((counts.mean() - counts).sign(), alpha=0.01)


class Hard(Task):
    """A memory of losses that weights samples."""

    step_state = ("remembered",)

    def build_model(self):
        model = nn.Module()
        model.net = decoder()
        model.register_buffer("remembered", torch.ones(NUM_SAMPLES, dtype=torch.float64))
        return model

    def train_dataset(self):
        return numbered()  # (vector, its index)

    def forward(self, model, batch):
        vectors, ids = batch
        return model.net(vectors), model.remembered[ids]

    def loss(self, outputs, batch):
        (decoded, weights), (vectors, ids) = outputs, batch
        losses = (decoded - vectors).square().mean(dim=1)
        gather = {"ids": ids, "losses": losses}
        return Loss((weights * losses).sum(), weights.sum(), gather=gather)

    def after_update(self, model, step):
        model.remembered[step.gathered["ids"]] = step.gathered["losses"]


class Clipped(Task):
    """Weights that are clipped (a critic of a WGAN)."""

    def build_model(self):
        return decoder()

    def train_dataset(self):
        return vectors()

    def forward(self, model, batch):
        return model(batch)

    def loss(self, outputs, batch):
        return Loss.mean(mse_loss(outputs, batch), len(batch))

    def after_update(self, model, step):
        for parameter in model.parameters():
            parameter.clamp_(-0.1, 0.1)

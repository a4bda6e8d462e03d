"""Forwards that copy an object of plain values, as a configuration, and go on with the copy."""

from __future__ import annotations

from pathlib import Path

from conftest import run_program

PROGRAM = """
import copy, warnings, torch, eagercache
from torch import nn
from eagercache.modules.manager import explain_module, manager
warnings.simplefilter("ignore")
torch.set_num_threads(1)

class Settings:
    bias = 1.0  # of the class
    def __init__(self):
        self.scale, self.names, self.table = 2.0, ["a", "b"], {"power": 2}
    @property
    def doubled(self):
        return 2.0 * self.scale

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.settings = nn.Linear(8, 8), Settings()
    def forward(self, x):
        own = copy.deepcopy(self.settings)
        own.scale = own.scale * 3.0
        own.names.append("c")
        last = copy.deepcopy(own)
        last.offset = 0.5
        y = self.linear(x) ** last.table["power"] * last.scale + last.offset
        y = torch.tanh(y * len(last.names) + getattr(last, "late", 0.0))
        return y + last.bias * own.doubled

class CopiesItself(Settings):
    def __deepcopy__(self, memo):
        made = Settings()
        made.scale = 7.0
        return made

class HoldsATensor(Settings):
    def __init__(self):
        super().__init__()
        self.table = {"power": torch.full((), 2)}

class HoldsTwice(Settings):
    def __init__(self):
        super().__init__()
        self.others = self.names

class Keeps(Layer):
    def forward(self, x):
        self.last = copy.deepcopy(self.settings)
        return torch.tanh(self.linear(x)) * self.last.scale

x = torch.ones(4, 8)

def enable():
    eagercache.enable((), modules="auto", training=True, on_miss="wait", choose="always")

def answer(module):
    module.zero_grad()
    y = module(x)
    y.sum().backward()
    return [y.detach().clone(), *(p.grad.clone() for p in module.parameters())]

def hits(module):
    return sum(stats.training_hits for one, stats in manager.stats() if one is module)
"""

CHANGES = """
def late(module):
    module.settings.late = 4.0
def scale(module):
    module.settings.scale = 5.0
def names(module):
    module.settings.names.append("d")
def table(module):
    module.settings.table["power"] = 3
def of_the_class(module):
    Settings.bias = -1.0
def class_late(module):
    Settings.late = 2.0
def of_the_property(module):
    Settings.doubled = property(lambda self: -self.scale)
def class_method(module):
    Settings.__deepcopy__ = lambda self, memo: CopiesItself.__deepcopy__(self, memo)

enable()
module = Layer()
for _ in range(4):
    answer(module)
seen = {"first": hits(module), "left": [module.settings.scale, *module.settings.names]}
for change in (late, scale, names, table, of_the_class, class_late, of_the_property, class_method):
    change(module)
    got = answer(module)
    eagercache.disable()
    torch.testing.assert_close(got, answer(module), rtol=1e-5, atol=1e-6, msg=change.__name__)
    enable()
    answer(module), answer(module)
    seen[change.__name__] = hits(module)
report(seen=seen, reason=str(explain_module(module)))
"""


def test_what_is_copied_is_guarded(cache: Path) -> None:
    result = run_program(PROGRAM + CHANGES, cache, timeout=600)
    seen = result["seen"]
    assert seen["first"] == 3, result["reason"]
    assert seen["left"] == [2.0, "a", "b"]
    # With other values there are other kernels.
    for change in ("late", "scale", "table", "of_the_class", "of_the_property"):
        assert seen[change] > 0, (change, result["reason"])


OTHERS = """
seen = {}
pairs = [(Layer, CopiesItself), (Layer, HoldsATensor), (Layer, HoldsTwice), (Keeps, Settings)]
for kind, settings in pairs:
    module = kind()
    module.settings = settings()
    native = answer(module)
    enable()
    for _ in range(3):
        torch.testing.assert_close(answer(module), native, rtol=1e-5, atol=1e-6)
    seen[f"{kind.__name__} {settings.__name__}"] = hits(module)
    if kind is Keeps:
        assert type(module.last) is Settings and module.last is not module.settings
    eagercache.disable()
report(seen=seen)
"""


def test_of_other_copies_the_forward_is_asked(cache: Path) -> None:
    seen = run_program(PROGRAM + OTHERS, cache, timeout=600)["seen"]
    assert set(seen.values()) == {0}, seen


MODELS = """
import transformers
transformers.logging.set_verbosity_error()
sizes = dict(vocab_size=50, pad_token_id=0, bos_token_id=1, eos_token_id=2)
sizes["decoder_start_token_id"] = 1
t5 = transformers.T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, **sizes)
layers = {f"{side}_{what}": number for side in ("encoder", "decoder")
          for what, number in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 32))}
whisper = transformers.WhisperConfig(d_model=16, max_source_positions=8, max_target_positions=8,
                                     num_mel_bins=4, **layers, **sizes)
words = torch.arange(12).view(2, 6) + 3
sounds = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(0))

def losses(kind, config, **given):
    torch.manual_seed(0)
    model = kind(config)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = []
    for _ in range(4):
        answer = model(labels=words, **given)
        optimizer.zero_grad()
        answer.loss.backward()
        optimizer.step()
        seen += [answer.loss.item(), len(answer.past_key_values.self_attention_cache.layers)]
    return model, seen

report_of = {}
for kind, config, given in (
    (transformers.T5ForConditionalGeneration, t5, {"input_ids": words}),
    (transformers.WhisperForConditionalGeneration, whisper, {"input_features": sounds}),
):
    _, native = losses(kind, config, **given)
    enable()
    model, got = losses(kind, config, **given)
    torch.testing.assert_close(got, native, rtol=1e-4, atol=1e-6)
    report_of[kind.__name__] = hits(model), str(explain_module(model))
    eagercache.disable()
report(seen=report_of)
"""


def test_models_whose_caches_copy_their_configuration(cache: Path) -> None:
    for model, (hits, reason) in run_program(PROGRAM + MODELS, cache, timeout=600)["seen"].items():
        assert hits == 3, (model, reason)

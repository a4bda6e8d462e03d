"""Everything that lives around a call gives what it gives without eagercache."""

from __future__ import annotations

from conftest import Program


def test_autograd_gives_the_same_gradients_and_backward_operators_hit(
    warm_program: Program,
) -> None:
    result = warm_program(
        """
        def run():
            y = x.clone().requires_grad_()
            out = forward(y)
            out.square().sum().backward()
            return out, y.grad
        out, grad = run()
        out, grad = run()
        hits = {n: o.hits for n, o in eagercache.stats().operators.items()}
        eagercache.disable()
        native_out, native_grad = run()
        torch.testing.assert_close(out, native_out)
        torch.testing.assert_close(grad, native_grad, rtol=1e-4, atol=1e-5)
        report(hits=hits, grad_fn=type(out.grad_fn).__name__ == type(native_out.grad_fn).__name__)
        """
    )
    assert result["grad_fn"]
    for op in ("native_layer_norm", "relu", "threshold_backward"):
        assert result["hits"][f"aten::{op}"] == 2


def test_no_grad_inference_mode_and_plain_share_one_key_and_keep_their_properties(
    warm_program: Program,
) -> None:
    result = warm_program(
        """
        plain = torch.softmax(x, -1)
        with torch.no_grad():
            no_grad = torch.softmax(x, -1)
        with torch.inference_mode():
            inference = torch.softmax(x, -1)
        tracked = torch.softmax(x.clone().requires_grad_(), -1)
        s = eagercache.stats().operators["aten::_softmax"]
        report(hits=s.hits, misses=s.misses,
               inference=[plain.is_inference(), no_grad.is_inference(), inference.is_inference()],
               requires_grad=[plain.requires_grad, tracked.requires_grad],
               version=[plain._version, no_grad._version])
        """
    )
    assert (result["hits"], result["misses"]) == (4, 0)
    assert result["inference"] == [False, False, True]
    assert result["requires_grad"] == [False, True]
    assert result["version"] == [0, 0]


def test_autocast_reaches_us_already_cast(warm_program: Program) -> None:
    result = warm_program(
        """
        with torch.autocast("cpu", torch.bfloat16):
            inside = torch.softmax(x, -1)
        eagercache.disable()
        with torch.autocast("cpu", torch.bfloat16):
            native = torch.softmax(x, -1)
        torch.testing.assert_close(inside, native)
        report(dtype=str(inside.dtype), same=inside.dtype == native.dtype)
        """
    )
    assert result["same"]


def test_vmap_and_functional_gradients_equal_native(warm_program: Program) -> None:
    result = warm_program(
        """
        from torch.func import grad, vmap, jvp
        def f(row):
            return torch.softmax(row, -1).square().sum()
        def run():
            mapped = vmap(lambda r: torch.softmax(r, -1))(x)
            return mapped, vmap(grad(f))(x), jvp(f, (x[0],), (w,))[1]
        mine = run()
        eagercache.disable()
        for a, b in zip(mine, run()):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
        report(ok=True)
        """
    )
    assert result["ok"]


def test_fake_and_meta_tensors_never_reach_a_kernel(warm_program: Program) -> None:
    result = warm_program(
        """
        from torch._subclasses.fake_tensor import FakeTensorMode
        with FakeTensorMode() as mode:
            fake = torch.softmax(mode.from_tensor(x), -1)
        meta = torch.softmax(x.to("meta"), -1)
        s = eagercache.stats()
        report(fake=[type(fake).__name__, list(fake.shape)], meta=[str(meta.device)],
               calls=sum(o.hits + o.misses for o in s.operators.values()))
        """
    )
    assert result["fake"] == ["FakeTensor", [64, 96]]
    assert result["meta"] == ["meta"]
    assert result["calls"] == 0


def test_torch_compile_works_around_enabled_operators(warm_program: Program) -> None:
    result = warm_program(
        """
        def f(t):
            return torch.softmax(t, -1) + 1
        compiled = torch.compile(f, backend="aot_eager")(x)
        eagercache.disable()
        torch.testing.assert_close(compiled, f(x))
        report(ok=True)
        """
    )
    assert result["ok"]


def test_a_torch_dispatch_subclass_sees_its_calls(warm_program: Program) -> None:
    result = warm_program(
        """
        from torch.utils._pytree import tree_map
        class Logged(torch.Tensor):
            seen = []
            @staticmethod
            def __new__(cls, elem):
                r = torch.Tensor._make_wrapper_subclass(cls, elem.shape, dtype=elem.dtype)
                r.elem = elem
                return r
            @classmethod
            def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
                cls.seen.append(str(func))
                unwrap = lambda t: t.elem if isinstance(t, Logged) else t
                out = func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {}))
                return tree_map(lambda t: Logged(t) if isinstance(t, torch.Tensor) else t, out)
        y = torch.softmax(Logged(x), -1)
        hits = eagercache.stats().hits
        eagercache.disable()
        torch.testing.assert_close(y.elem, torch.softmax(x, -1))
        report(seen=Logged.seen, kind=type(y).__name__, hits=hits)
        """
    )
    assert result["seen"] == ["aten._softmax.default"]
    assert result["kind"] == "Logged"
    assert result["hits"] == 1  # the plain tensor inside


def test_a_dispatch_mode_sees_its_calls(warm_program: Program) -> None:
    result = warm_program(
        """
        from torch.utils.flop_counter import FlopCounterMode
        from torch.utils._python_dispatch import TorchDispatchMode
        class Seen(TorchDispatchMode):
            names = []
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                self.names.append(str(func))
                return func(*args, **(kwargs or {}))
        with Seen():
            inside = torch.softmax(x, -1)
        hits = eagercache.stats().hits
        eagercache.disable()
        torch.testing.assert_close(inside, torch.softmax(x, -1))
        report(names=Seen.names, hits=hits)
        """
    )
    assert result["names"] == ["aten._softmax.default"]
    assert result["hits"] == 1


def test_conj_neg_sparse_empty_and_overlap_step_aside_and_equal_native(
    warm_program: Program,
) -> None:
    result = warm_program(
        """
        cases = [
            lambda: torch.var(torch.randn(4, 4, dtype=torch.complex64).conj(), -1),
            lambda: torch.softmax(torch.empty(0, 5), -1),
            lambda: torch.nn.functional.silu(torch.ones(3).expand(4, 3)),
        ]
        torch.manual_seed(1)
        mine = [case() for case in cases]
        reasons = {k: v for o in eagercache.stats().operators.values()
                   for k, v in o.aside_reasons.items()}
        eagercache.disable()
        torch.manual_seed(1)
        for a, case in zip(mine, cases):
            torch.testing.assert_close(a, case())
        report(reasons=reasons)
        """
    )
    assert "empty_tensor" in result["reasons"]


def test_errors_are_natives_own_cold_and_beside_a_cached_neighbour(
    warm_program: Program,
) -> None:
    result = warm_program(
        """
        def messages():
            texts = []
            for call in (lambda: torch.softmax(x, 5), lambda: torch.var(x, 7),
                         lambda: torch.nn.functional.layer_norm(x, (95,), w, w)):
                try:
                    call()
                    texts.append("no error")
                except Exception as error:
                    texts.append(f"{type(error).__name__}: {error}")
            return texts
        torch.softmax(x, -1)
        mine = messages()
        eagercache.disable()
        report(mine=mine, native=messages())
        """
    )
    assert result["mine"] == result["native"]
    assert "no error" not in result["mine"]


DATA_LOADER = """
import os
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        y = torch.softmax(x + 0 * index, -1)
        z = torch.softmax(torch.ones(5, 7 + index), -1)   # a key that no store has
        s = eagercache.stats()
        return torch.tensor([y.sum(), z.sum(), s.compiles, float(eagercache.is_enabled())])
"""


def _files(folder: object) -> set[str]:
    from pathlib import Path

    # Without the records of first runs, which every process that loads a kernel has.
    return {str(p) for p in Path(str(folder)).rglob("*") if p.parent.name != "a"}


def test_forked_data_loader_workers_answer_natively_and_never_compile_or_write(
    warm_program: Program, warm_cache: object
) -> None:
    before = _files(warm_cache)
    result = warm_program(
        "import multiprocessing\n"
        + DATA_LOADER
        + """
eagercache.enable(["_softmax"], on_miss="background", choose="always")
torch.softmax(x, -1)
loader = torch.utils.data.DataLoader(Data(), num_workers=2, multiprocessing_context="fork")
rows = torch.cat(list(loader))
report(sums=rows[:, :2].tolist(), compiles=rows[:, 2].max().item(), enabled=rows[:, 3].max().item())
""",
    )
    for total, small in result["sums"]:
        assert abs(total - 64) < 1e-3 and abs(small - 5) < 1e-4
    assert result["compiles"] == 0
    assert result["enabled"] == 0
    assert _files(warm_cache) - before == set()


def test_spawned_workers_use_the_store_but_never_compile_or_write(
    warm_cache: object, tmp_path: object
) -> None:
    import subprocess
    import sys
    from pathlib import Path

    from conftest import SHARED_CALLS, clean_environment

    script = Path(str(tmp_path)) / "main.py"
    script.write_text(
        SHARED_CALLS
        + """
import eagercache
eagercache.enable(["_softmax"], on_miss="background", choose="always")
"""
        + DATA_LOADER
        + """
if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(Data(), num_workers=2, multiprocessing_context="spawn")
    rows = torch.cat(list(loader))
    assert rows[:, 2].max() == 0, rows
    assert rows[:, 3].min() == 1, rows
    print("done", float((rows[:, 0] - 64).abs().max()) < 1e-3)
""",
        encoding="utf-8",
    )
    before = _files(warm_cache)
    done = subprocess.run(
        [sys.executable, str(script)],
        env=clean_environment(EAGERCACHE_DIR=str(warm_cache)),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.stdout.strip() == "done True", done.stdout + done.stderr
    assert _files(warm_cache) - before == set()

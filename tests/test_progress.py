"""The bar says how far a text is read, and leaves nothing behind."""

from conftest import small, tiny

from nanokv.engine import Engine
from nanokv.progress import reading


def test_every_layer_of_every_piece_is_a_step(capsys):
    engine = Engine(tiny(), small("window", 40), chunk=10)
    with reading(engine, 20):
        engine.extend(range(20))
    engine.decode([1])
    err = capsys.readouterr().err
    assert [part.split("]")[1].strip() for part in err.split("\r")[1:-2]] == ["17 %", "33 %", "50 %", "67 %", "83 %", "100 %"]
    assert err.startswith("\rreading 20 tokens [#####  ") and err.endswith(" \r")
    assert not any(block._forward_hooks for block in engine.model.blocks)

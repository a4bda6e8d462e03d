"""Warns, logs to standard error, saves a model and loads it."""

import io
import logging
import sys
import warnings

import torch

logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(message)s", level=logging.INFO)
torch.manual_seed(4)
model = torch.nn.GRU(4, 8)
stream = io.BytesIO()
torch.save(model.state_dict(), stream)
logging.info("saved %d tensors", len(model.state_dict()))
stream.seek(0)
other = torch.nn.GRU(4, 8)
other.load_state_dict(torch.load(stream))
warnings.warn("loaded", stacklevel=1)
x = torch.randn(5, 2, 4)
print(torch.equal(model(x)[0], other(x)[0]), type(model).__mro__[1].__name__)

"""e4m3 by integers: what GPUs without the type compute, and what every GPU encodes."""

import numpy as np
import torch
import triton
import triton.language as tl

from castline.plugins.contract import KvDtypeCode
from castline.plugins.reference import round_trip
from castline.plugins.tensorrt.kernels.elements import decode_e4m3, encode_e4m3


@triton.jit
def there_and_back(x, codes, back, n: tl.constexpr):
    i = tl.arange(0, n)
    code = encode_e4m3(tl.load(x + i))
    tl.store(codes + i, code)
    tl.store(back + i, decode_e4m3(code))


def test_every_value_and_every_rounding() -> None:
    """All values of the type come back; floats around every tie round as the reference does."""
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    values = values[~values.isnan()].sort().values.unique()
    ties = (values[1:] + values[:-1]) / 2
    around = torch.cat([values, ties, torch.nextafter(ties, ties + 1), torch.nextafter(ties, ties - 1)])
    around = torch.cat([around, torch.tensor([449.0, 1e9, -1e9, 1e-9, -1e-9, 0.0, -0.0])])
    x = torch.zeros(2048)
    x[: len(around)] = around
    found, back = torch.empty(2048, dtype=torch.uint8), torch.empty(2048)
    there_and_back[(1,)](x, found, back, n=2048)
    expected = round_trip(x.numpy(), int(KvDtypeCode.FP8))
    np.testing.assert_array_equal(back.numpy(), expected)
    np.testing.assert_array_equal(found.view(torch.float8_e4m3fn).float().numpy(), expected)

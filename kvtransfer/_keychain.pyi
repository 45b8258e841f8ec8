import numpy as np
import numpy.typing as npt

def available() -> bool: ...
def chain(
    parent: bytes, data: npt.NDArray[np.uint8], block_bytes: int, out: npt.NDArray[np.uint8]
) -> None: ...

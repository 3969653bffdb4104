"""RowDiT: train, sample, evaluate and compare Diffusion Transformers with AdamW, Muon and Periodic Row-wise Muon.

The optimizers live in the package ``rowmuon``, which needs torch alone; this package is the system around them and uses
them through their public names, as any other program would. Start at ``rowdit.cli`` (the verbs) and ``rowdit.recipes``
(the runs). Importing ``rowdit`` itself loads nothing.
"""

__version__ = "0.1.0"

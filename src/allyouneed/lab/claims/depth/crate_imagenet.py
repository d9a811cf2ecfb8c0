from __future__ import annotations

from allyouneed.lab.claims.claim import Claim

CLAIM = Claim(
    "Yu et al. 2023, White-Box Transformers via Sparse Rate Reduction, table 1 and figure 3",
    (
        "66.7 to 71.3% on ImageNet-1k with 6 to 78M parameters; coding rate and number of non-zero features fall "
        "from layer to layer.",
        "6M 到 78M 参数时 ImageNet-1k 准确率 66.7% 到 71.3%；编码率与非零特征数逐层下降。",
    ),
    why_not=(
        "Needs ImageNet. Rate and sparsity by layer are measured on small pictures by bench/family/crate.py "
        "(docs/results/crate.md).",
        "需要 ImageNet。各层的编码率与稀疏度由 bench/family/crate.py 在小图像上测量（docs/results/crate.md）。",
    ),
)

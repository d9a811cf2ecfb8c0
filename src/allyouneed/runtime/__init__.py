"""How a model is executed. Knows the parts; no part knows it.

    trace.py     runs a stack's own forward on symbolic values and records a Program (program.py)
    eager.py     runs a program by calling its parts in torch: the definition
    cpu/         lowers a program to instructions of the native interpreter (kernels/cpu)
    cuda/        lowers it to fused kernels over states of a fixed shape, captured in CUDA graphs
    report.py    says which executor a model gets, and which parts keep it from the fast one

Executors keep rules for parts by class (rules.py). A part needs none to work: without one it is called inside the
program. To make a part fast, register

    cpu/lower.py           @lower.register(MyModule)             the instructions it becomes
    cuda/kernels.py        @make_kernel.register(MyModule)       a kernel for one token a row
    cuda/static_cache.py   @make_static_state.register(MyModule) a state of a fixed shape, if it keeps one
    cuda/capture.py        @check_capture.register(MyModule)     what of it a CUDA graph cannot hold

A rule raises `Unsupported` with a reason for what it does not cover; `allyouneed describe` prints the reasons.
"""

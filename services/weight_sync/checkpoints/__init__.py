"""Checkpoints in Hugging Face layout: read and checked, converted between bf16 and fp8, compared, summarised.

    folder   a directory, checked from its headers      formats  what quantization_config says
    weights  matrices and their scales, paired          targets  which of them become fp8
    plan     what goes where, as data                   convert  a plan carried out, over and over if killed
    compare  two checkpoints, tensor by tensor          summary  what is in one

`plan` is pure, and sees every fault that headers show; `convert` writes nothing before `plan` is done.
"""

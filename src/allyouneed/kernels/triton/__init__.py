from allyouneed.kernels.preload import wait_for_libraries

wait_for_libraries()

# arguments that change with the length of a text: a kernel would be compiled again for 1 and for multiples of 16
TEXT_SIZES = ("time", "chunks", "share", "segments", "log_row", "log_head")

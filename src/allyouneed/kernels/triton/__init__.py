from allyouneed.kernels.preload import wait_for_libraries

wait_for_libraries()

//! Without a GPU: errors that name what is missing, and no panic.

use runtime_cuda::Cuda;

#[test]
fn what_is_missing_is_named() {
    // An index that no machine has, so that this holds on machines with GPUs as well.
    let error = Cuda::new(4096).unwrap_err().to_string();
    let named =
        ["libcuda was not found", "libnvrtc was not found", "libcublasLt was not found", "no GPU 4096", "CUDA_ERROR"];
    assert!(error.starts_with("Cuda::new: cuda:4096 failed: "), "{error}");
    assert!(named.iter().any(|n| error.contains(n)), "{error}");
}

//! GEMM by cuBLASLt. A problem is described once and its algorithm chosen by the library's heuristic; both are cached.
//!
//! No algorithm splits a sum over atomics on floats, and the same problem always takes the same one. So results repeat
//! to the bit on one kind of GPU. Tuning asks for several candidates under the same conditions.

use std::{
    collections::HashMap,
    ffi::c_void,
    sync::{Arc, OnceLock},
};

use cudarc::cublaslt::{
    result::{self, CublasError},
    sys,
};
use numcore::DType;
use parking_lot::Mutex;

use super::{CublasGemm, CudaStream, DriverFailure, DriverFailureKind, Epilogue, Fallible, GemmOperand, GemmPlaces};

/// The number of problems that are cached; at this number the cache is cleared.
const KEPT: usize = 4096;

/// The most algorithms per problem that are requested for timing.
const CANDIDATES: usize = 8;

/// A handle of the library, and the problems described so far.
pub(super) struct Blas {
    handle: sys::cublasLtHandle_t,
    problems: Mutex<HashMap<(CublasGemm, usize), Arc<CublasPlan>>>,
}

fn words(e: CublasError) -> DriverFailure {
    said(e, format!("cuBLASLt: {e}"))
}

/// Converts a status of the library. Its code does not reveal a fault of the device: the driver is asked for that.
fn said(e: CublasError, message: String) -> DriverFailure {
    match e.0 {
        sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED => DriverFailure::not_supported(message),
        _ => DriverFailure::new(message),
    }
}

impl Blas {
    /// Creates a handle in the current context.
    pub(super) fn new() -> Fallible<Blas> {
        Ok(Blas { handle: result::create_handle().map_err(words)?, problems: Mutex::default() })
    }

    /// Queues a GEMM with the algorithm of number `candidate`, or with the library's choice.
    ///
    /// # Safety
    /// The conditions of [`Driver::gemm`](super::Driver::gemm); the context is current.
    pub(super) unsafe fn gemm(
        &self,
        stream: CudaStream,
        gemm: &CublasGemm,
        at: GemmPlaces,
        (workspace, size): (u64, usize),
        candidate: Option<usize>,
    ) -> Fallible<()> {
        let problem = self.problem(gemm, at.vector, size)?;
        let algorithm = match candidate {
            None => &problem.algorithm,
            Some(i) => {
                let found = problem.candidates(self.handle, gemm, size)?;
                found.get(i).ok_or_else(|| DriverFailure::not_supported(format!("no algorithm {i} for {gemm:?}")))?
            }
        };
        // A description contains the address of the vector, so each call with a vector has its own.
        let has_vector = gemm.epilogue != Epilogue::Nothing;
        let own = if has_vector { Some(MatmulDescription::new(gemm, at.vector)?) } else { None };
        let beta = if gemm.add || gemm.c.is_some() { 1.0 } else { 0.0 };
        let (wide, narrow) = ([1.0f64, beta], [1.0f32, beta as f32]);
        let scales: [*const c_void; 2] = match gemm.dtype {
            DType::F64 => wide.each_ref().map(|x| std::ptr::from_ref(x).cast()),
            _ => narrow.each_ref().map(|x| std::ptr::from_ref(x).cast()),
        };
        let [a, b, d, c] = [at.a, at.b, at.d, at.c].map(|address| address as usize as *mut c_void);
        let (c, layout_of_c) = if gemm.c.is_some() { (c, problem.c) } else { (d, problem.d) };
        // SAFETY: the caller's promise; descriptors live in `problem`, scales on the stack, and are read before the
        // call returns.
        let done = unsafe {
            result::matmul(
                self.handle,
                own.as_ref().unwrap_or(&problem.product).0,
                scales[0],
                scales[1],
                a,
                problem.a,
                b,
                problem.b,
                c,
                layout_of_c,
                d,
                problem.d,
                algorithm,
                workspace as usize as *mut c_void,
                size,
                stream.raw().cast(),
            )
        };
        done.map_err(|e| said(e, format!("cuBLASLt: {e} for {gemm:?}")))
    }

    /// The number of algorithms to choose from; 0 if the library has none. The context is current.
    pub(super) fn candidates(&self, gemm: &CublasGemm, vector: u64, workspace: usize) -> Fallible<usize> {
        match self.problem(gemm, vector, workspace) {
            Ok(problem) => problem.candidates(self.handle, gemm, workspace).map(<[_]>::len),
            Err(failure) if failure.kind == DriverFailureKind::NotSupported => Ok(0),
            Err(failure) => Err(failure),
        }
    }

    fn problem(&self, gemm: &CublasGemm, vector: u64, workspace: usize) -> Fallible<Arc<CublasPlan>> {
        let mut problems = self.problems.lock();
        if let Some(problem) = problems.get(&(*gemm, workspace)) {
            return Ok(problem.clone());
        }
        let problem = Arc::new(CublasPlan::new(self.handle, gemm, vector, workspace)?);
        if problems.len() >= KEPT {
            problems.clear();
        }
        problems.insert((*gemm, workspace), problem.clone());
        Ok(problem)
    }

    /// Destroys the library's handle. The context is current.
    pub(super) fn destroy(&mut self) {
        self.problems.lock().clear();
        // SAFETY: made in `new`, and this is the last use.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

/// A description of a product: types, transpositions, and the epilogue with its vector.
struct MatmulDescription(sys::cublasLtMatmulDesc_t);

impl MatmulDescription {
    fn new(gemm: &CublasGemm, vector: u64) -> Fallible<MatmulDescription> {
        let (compute, scale) = match gemm.dtype {
            DType::F64 => (sys::cublasComputeType_t::CUBLAS_COMPUTE_64F, sys::cudaDataType_t::CUDA_R_64F),
            DType::F32 if gemm.tf32 => {
                (sys::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32, sys::cudaDataType_t::CUDA_R_32F)
            }
            _ => (sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, sys::cudaDataType_t::CUDA_R_32F),
        };
        let description = MatmulDescription(result::create_matmul_desc(compute, scale).map_err(words)?);
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let op = |side: &GemmOperand| if side.transposed { 1i32 } else { 0 };
        let set = |which, value: *const c_void, size| {
            // SAFETY: the description lives; the value has the attribute's size.
            unsafe { result::set_matmul_desc_attribute(description.0, which, value, size) }.map_err(words)
        };
        set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, std::ptr::from_ref(&op(&gemm.a)).cast(), 4)?;
        set(Attribute::CUBLASLT_MATMUL_DESC_TRANSB, std::ptr::from_ref(&op(&gemm.b)).cast(), 4)?;
        let epilogue = match gemm.epilogue {
            Epilogue::Nothing => return Ok(description),
            Epilogue::Bias => sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS,
            Epilogue::SumOfA => sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BGRADA,
            Epilogue::SumOfB => sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BGRADB,
        } as u32;
        set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, std::ptr::from_ref(&epilogue).cast(), 4)?;
        set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, std::ptr::from_ref(&vector).cast(), 8)?;
        Ok(description)
    }
}

impl Drop for MatmulDescription {
    fn drop(&mut self) {
        // SAFETY: made in `new`; nothing uses it any more.
        let _ = unsafe { result::destroy_matmul_desc(self.0) };
    }
}

/// A GEMM as a cuBLASLt problem description.
struct CublasPlan {
    product: MatmulDescription,
    a: sys::cublasLtMatrixLayout_t,
    b: sys::cublasLtMatrixLayout_t,
    d: sys::cublasLtMatrixLayout_t,
    /// The layout of `C`; null where nothing but `D` itself is added.
    c: sys::cublasLtMatrixLayout_t,
    algorithm: sys::cublasLtMatmulAlgo_t,
    /// Algorithms that were requested for timing.
    candidates: OnceLock<Vec<sys::cublasLtMatmulAlgo_t>>,
}

// SAFETY: descriptions that are only read once they are made.
unsafe impl Send for CublasPlan {}
// SAFETY: as above.
unsafe impl Sync for CublasPlan {}

impl CublasPlan {
    fn new(handle: sys::cublasLtHandle_t, gemm: &CublasGemm, vector: u64, workspace: usize) -> Fallible<CublasPlan> {
        let null: sys::cublasLtMatrixLayout_t = std::ptr::null_mut();
        let product = MatmulDescription::new(gemm, vector)?;
        // SAFETY: an algorithm is plain bytes; this one is replaced before it is used.
        let algorithm = unsafe { std::mem::zeroed() };
        let mut problem =
            CublasPlan { product, a: null, b: null, d: null, c: null, algorithm, candidates: OnceLock::new() };
        let side = |side: &GemmOperand, rows: usize, columns: usize| {
            let (rows, columns) = if side.transposed { (columns, rows) } else { (rows, columns) };
            layout(gemm, side, gemm.dtype, rows, columns)
        };
        problem.a = side(&gemm.a, gemm.m, gemm.k)?;
        problem.b = side(&gemm.b, gemm.k, gemm.n)?;
        problem.d = layout(gemm, &gemm.d, gemm.into, gemm.m, gemm.n)?;
        if let Some(c) = &gemm.c {
            problem.c = layout(gemm, c, gemm.into, gemm.m, gemm.n)?;
        }
        problem.algorithm = problem.choose(handle, gemm, workspace)?;
        Ok(problem)
    }

    fn choose(
        &self,
        handle: sys::cublasLtHandle_t,
        gemm: &CublasGemm,
        workspace: usize,
    ) -> Fallible<sys::cublasLtMatmulAlgo_t> {
        let found = self.suggested::<1>(handle, gemm, workspace)?.pop();
        found.ok_or_else(|| DriverFailure::not_supported(format!("cuBLASLt: no algorithm for {gemm:?}")))
    }

    /// The algorithms to time, requested once.
    fn candidates(
        &self,
        handle: sys::cublasLtHandle_t,
        gemm: &CublasGemm,
        workspace: usize,
    ) -> Fallible<&[sys::cublasLtMatmulAlgo_t]> {
        if let Some(found) = self.candidates.get() {
            return Ok(found);
        }
        let found = self.suggested::<CANDIDATES>(handle, gemm, workspace)?;
        Ok(self.candidates.get_or_init(|| found))
    }

    /// Up to `N` algorithms that need no more than the workspace, best first by the library's estimate.
    fn suggested<const N: usize>(
        &self,
        handle: sys::cublasLtHandle_t,
        gemm: &CublasGemm,
        workspace: usize,
    ) -> Fallible<Vec<sys::cublasLtMatmulAlgo_t>> {
        let preference = Preference::new(gemm, workspace)?;
        let c = if gemm.c.is_some() { self.c } else { self.d };
        // SAFETY: results are plain bytes, and zeros are a status.
        let mut found: [sys::cublasLtMatmulHeuristicResult_t; N] = unsafe { std::mem::zeroed() };
        let mut count = 0;
        let (to, most) = (found.as_mut_ptr(), N as i32);
        // SAFETY: all descriptions live, and there is room for this many results.
        let status = unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                handle,
                self.product.0,
                self.a,
                self.b,
                c,
                self.d,
                preference.0,
                most,
                to,
                &mut count,
            )
        };
        let fits = |h: &&sys::cublasLtMatmulHeuristicResult_t| {
            h.state == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS && h.workspaceSize <= workspace
        };
        match status.result() {
            Ok(()) => Ok(found.iter().take(count as usize).filter(fits).map(|h| h.algo).collect()),
            Err(e) if e.0 == sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED => Ok(Vec::new()),
            Err(e) => Err(words(e)),
        }
    }
}

impl Drop for CublasPlan {
    fn drop(&mut self) {
        // SAFETY: made in `new`; nothing uses them any more.
        unsafe {
            for layout in [self.a, self.b, self.c, self.d].into_iter().filter(|l| !l.is_null()) {
                let _ = result::destroy_matrix_layout(layout);
            }
        }
    }
}

/// Conditions that algorithms have to meet.
struct Preference(sys::cublasLtMatmulPreference_t);

impl Preference {
    fn new(gemm: &CublasGemm, workspace: usize) -> Fallible<Preference> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let preference = Preference(result::create_matmul_pref().map_err(words)?);
        let set = |which, value: *const c_void, size| {
            // SAFETY: the preference lives; the value has the attribute's size.
            unsafe { result::set_matmul_pref_attribute(preference.0, which, value, size) }.map_err(words)
        };
        let bytes = workspace as u64;
        set(Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, std::ptr::from_ref(&bytes).cast(), 8)?;
        // Sums that are split over blocks are added up in the compute type. By default they may be added in the
        // output's type, and a half would be rounded once per part.
        let scheme = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
        set(Attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, std::ptr::from_ref(&scheme).cast(), 4)?;
        for (which, side) in [
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &gemm.a),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &gemm.b),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, gemm.c.as_ref().unwrap_or(&gemm.d)),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &gemm.d),
        ] {
            set(which, std::ptr::from_ref(&side.aligned).cast(), 4)?;
        }
        Ok(preference)
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: it was created, and nothing uses it any more.
        let _ = unsafe { result::destroy_matmul_pref(self.0) };
    }
}

/// The layout of a matrix in memory.
fn layout(
    gemm: &CublasGemm,
    side: &GemmOperand,
    dtype: DType,
    rows: usize,
    columns: usize,
) -> Fallible<sys::cublasLtMatrixLayout_t> {
    let dtype = match dtype {
        DType::F64 => sys::cudaDataType_t::CUDA_R_64F,
        DType::F16 => sys::cudaDataType_t::CUDA_R_16F,
        DType::BF16 => sys::cudaDataType_t::CUDA_R_16BF,
        _ => sys::cudaDataType_t::CUDA_R_32F,
    };
    let layout =
        result::create_matrix_layout(dtype, rows as u64, columns as u64, side.leading as i64).map_err(words)?;
    use sys::cublasLtMatrixLayoutAttribute_t as Attribute;
    let (count, stride) = (gemm.batch as i32, side.batch as i64);
    let values: [(_, *const c_void, usize); 2] = [
        (Attribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, std::ptr::from_ref(&count).cast(), 4),
        (Attribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, std::ptr::from_ref(&stride).cast(), 8),
    ];
    for (which, value, size) in values {
        // SAFETY: the layout lives; the value has the attribute's size.
        let set = unsafe { result::set_matrix_layout_attribute(layout, which, value, size) };
        if let Err(e) = set {
            // SAFETY: made above, not used any more.
            let _ = unsafe { result::destroy_matrix_layout(layout) };
            return Err(words(e));
        }
    }
    Ok(layout)
}

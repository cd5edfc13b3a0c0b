//! The file in which a driver keeps compiled kernels between processes, where its interface has one (Vulkan).

use std::{
    env, fs,
    hash::Hasher,
    io,
    path::{Path, PathBuf},
    process,
};

use numcore::Fnv1a;

/// A driver's cache of compiled kernels, and its file.
pub(crate) struct KernelFile {
    pub(crate) cache: wgpu::PipelineCache,
    path: PathBuf,
    /// The hash of the contents that the file has.
    kept: u64,
}

impl KernelFile {
    /// The cache of an adapter's kernels, with those of earlier processes. None where the interface has no cache, or
    /// the user no cache folder.
    pub(crate) fn open(device: &wgpu::Device, info: &wgpu::AdapterInfo, folder: Option<PathBuf>) -> Option<Self> {
        if !device.features().contains(wgpu::Features::PIPELINE_CACHE) {
            return None;
        }
        let path = folder?.join(wgpu::util::pipeline_cache_key(info)?);
        let data = read(&path);
        let kept = data.as_deref().map_or(0, hash);
        let descriptor =
            wgpu::PipelineCacheDescriptor { label: Some("weftgrad"), data: data.as_deref(), fallback: true };
        // SAFETY: the data is a cache's own that `save` wrote, as their hash tells; wgpu compares adapter and driver.
        let cache = unsafe { device.create_pipeline_cache(&descriptor) };
        Some(KernelFile { cache, path, kept })
    }

    /// Writes the kernels that were compiled since the last time. A file that cannot be written is only slower.
    pub(crate) fn save(&mut self) {
        let Some(data) = self.cache.get_data() else { return };
        let hash = hash(&data);
        if hash != self.kept && write(&self.path, &data, hash).is_ok() {
            self.kept = hash;
        }
    }
}

/// The folder of compiled kernels in the user's cache folder; none without a home folder.
pub(crate) fn folder() -> Option<PathBuf> {
    let given = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = given("XDG_CACHE_HOME").or_else(|| given("HOME").map(|home| home.join(".cache")));
    cache.map(|cache| cache.join("weftgrad").join("wgpu"))
}

/// The contents of a file that `write` wrote; none if it is damaged.
fn read(path: &Path) -> Option<Vec<u8>> {
    let bytes = fs::read(path).ok()?;
    let (head, data) = bytes.split_first_chunk()?;
    (u64::from_le_bytes(*head) == hash(data)).then(|| data.to_vec())
}

/// Writes a hash and the contents to a temporary file and renames it, so that no reader sees a part of it.
fn write(path: &Path, data: &[u8], hash: u64) -> io::Result<()> {
    path.parent().map_or(Ok(()), fs::create_dir_all)?;
    let beside = path.with_extension(format!("{}.part", process::id()));
    fs::write(&beside, [hash.to_le_bytes().as_slice(), data].concat())?;
    fs::rename(&beside, path)
}

fn hash(bytes: &[u8]) -> u64 {
    let mut hash = Fnv1a::seeded(0);
    hash.write(bytes);
    hash.finish()
}

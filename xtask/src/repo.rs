//! Where the repository is.

use std::path::PathBuf;

/// The root folder of the repository.
///
/// Cargo's run-time variable comes first: the path compiled in is stale when two checkouts share a target directory.
pub(crate) fn root() -> PathBuf {
    let here = std::env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from);
    here.parent().map_or(here.clone(), PathBuf::from)
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_root_holds_this_package() {
        assert!(super::root().join("xtask/Cargo.toml").is_file());
    }
}

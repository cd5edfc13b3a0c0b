//! The source tree as every rule sees it: paths from the root with `/`, sorted, and file contents in memory.

use std::io;
use std::path::Path;

use super::ignore::Ignore;

/// The files of the repository, without what `.gitignore` names.
pub(super) struct Tree {
    files: Vec<File>,
}

struct File {
    path: String,
    /// The content; `None` if it is not UTF-8.
    text: Option<String>,
}

impl Tree {
    /// Reads everything below `root`. Links are not followed.
    pub(super) fn read(root: &Path) -> io::Result<Tree> {
        let ignore = Ignore::parse(&std::fs::read_to_string(root.join(".gitignore"))?).map_err(io::Error::other)?;
        let mut files = Vec::new();
        read_folder(root, "", &ignore, &mut files)?;
        Ok(Tree::sorted(files))
    }

    /// A tree in memory.
    #[cfg(test)]
    pub(super) fn of(files: &[(&str, &str)]) -> Tree {
        let file = |&(path, text): &(&str, &str)| File { path: path.into(), text: Some(text.into()) };
        Tree::sorted(files.iter().map(file).collect())
    }

    fn sorted(mut files: Vec<File>) -> Tree {
        files.sort_by(|a, b| a.path.cmp(&b.path));
        Tree { files }
    }

    /// The path and content of every text file whose path ends with `suffix`.
    pub(super) fn texts<'a>(&'a self, suffix: &'a str) -> impl Iterator<Item = (&'a str, &'a str)> {
        let texts = self.files.iter().filter_map(|file| Some((file.path.as_str(), file.text.as_deref()?)));
        texts.filter(move |(path, _)| path.ends_with(suffix))
    }

    /// The content of the file at `path`.
    pub(super) fn text(&self, path: &str) -> Option<&str> {
        self.files.iter().find(|file| file.path == path)?.text.as_deref()
    }

    /// Whether there is a file or a folder at `path` (as [`resolve`] gives it).
    pub(super) fn exists(&self, path: &str) -> bool {
        let inside =
            |file: &File| file.path.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
        path.is_empty() || self.files.iter().any(inside)
    }
}

/// `target` as written in the file `from`: a path from the root, or None if it leaves the repository.
/// A leading `/` means the root.
pub(super) fn resolve(from: &str, target: &str) -> Option<String> {
    let folder = if target.starts_with('/') { "" } else { from.rsplit_once('/').map_or("", |(folder, _)| folder) };
    let mut parts: Vec<&str> = folder.split('/').filter(|part| !part.is_empty()).collect();
    for part in target.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()?),
            name => parts.push(name),
        }
    }
    Some(parts.join("/"))
}

fn read_folder(folder: &Path, path: &str, ignore: &Ignore, files: &mut Vec<File>) -> io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let (kind, path) = (entry.file_type()?, joined(path, &entry.file_name().to_string_lossy()));
        if path == ".git" || ignore.ignores(&path, kind.is_dir()) {
            continue;
        }
        if kind.is_dir() {
            read_folder(&entry.path(), &path, ignore, files)?;
        } else if kind.is_file() {
            files.push(File { path, text: String::from_utf8(std::fs::read(entry.path())?).ok() });
        }
    }
    Ok(())
}

fn joined(folder: &str, name: &str) -> String {
    if folder.is_empty() { name.into() } else { format!("{folder}/{name}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_and_their_folders_exist() {
        let tree = Tree::of(&[("a/b/c.rs", ""), ("d.md", "")]);
        assert!(["", "a", "a/b", "a/b/c.rs", "d.md"].iter().all(|path| tree.exists(path)));
        assert!(!["a/b/c", "b", "d", "a/"].iter().any(|path| tree.exists(path)));
    }

    #[test]
    fn targets_are_resolved_from_their_file() {
        let check = |from, target, expect: Option<&str>| assert_eq!(resolve(from, target).as_deref(), expect);
        check("README.md", "LICENSE-MIT", Some("LICENSE-MIT"));
        check("a/b/README.md", "../x/", Some("a/x"));
        check("a/README.md", "./y.rs", Some("a/y.rs"));
        check("a/README.md", "/y.rs", Some("y.rs"));
        check("a/README.md", "../../y.rs", None);
    }

    #[test]
    fn this_repository_is_read() {
        let tree = Tree::read(&crate::repo::root()).expect("readable");
        assert!(tree.text("xtask/src/tidy/tree.rs").is_some_and(|text| text.contains("this_repository_is_read")));
        assert!(tree.texts("").all(|(path, _)| !path.starts_with(".git/") && !path.starts_with("target/")));
        assert!(tree.texts("").map(|(path, _)| path).is_sorted());
    }
}

//! Repositories of the Hugging Face Hub as folders, in the cache that Hugging Face's own tools share.

mod client;

use std::{
    env, fmt, fs, io,
    path::{Component, Path, PathBuf},
};

use numcore::{Error, Result};
use serde_json::Value;

use self::client::{HubClient, holds};

/// Options of a [`Hub`]. The defaults are those of the environment, under the names that `huggingface_hub` reads.
#[derive(Clone)]
pub struct HubOptions {
    /// The address of the service: `HF_ENDPOINT`, or `https://huggingface.co`.
    pub endpoint: String,
    /// The folder of the cache: `HF_HUB_CACHE`, or `hub` in `HF_HOME`, which is `~/.cache/huggingface` unless set.
    pub cache: PathBuf,
    /// The token of an account, for repositories that need one: `HF_TOKEN`, or the file `token` in `HF_HOME`.
    pub token: Option<String>,
    /// True to read the cache alone: `HF_HUB_OFFLINE` is 1, `ON`, `YES` or `TRUE`.
    pub offline: bool,
    /// True to show the progress of downloads on the terminal.
    pub progress: bool,
}

/// All but the token, which is a secret.
impl fmt::Debug for HubOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let HubOptions { endpoint, cache, token, offline, progress } = self;
        let mut shown = f.debug_struct("HubOptions");
        shown.field("endpoint", endpoint).field("cache", cache).field("token", &token.as_ref().map(|_| "…"));
        shown.field("offline", offline).field("progress", progress).finish()
    }
}

impl Default for HubOptions {
    fn default() -> Self {
        let variable = |name: &str| env::var(name).ok().filter(|value| !value.trim().is_empty());
        let cache = || Some(PathBuf::from(variable("XDG_CACHE_HOME")?).join("huggingface"));
        let user = || env::home_dir().unwrap_or_default().join(".cache/huggingface");
        let home = variable("HF_HOME").map(PathBuf::from).or_else(cache).unwrap_or_else(user);
        let saved = || fs::read_to_string(home.join("token")).ok().filter(|token| !token.trim().is_empty());
        let yes = |value: String| matches!(value.to_uppercase().as_str(), "1" | "ON" | "YES" | "TRUE");
        HubOptions {
            endpoint: variable("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".into()),
            cache: variable("HF_HUB_CACHE").map_or_else(|| home.join("hub"), PathBuf::from),
            token: variable("HF_TOKEN").or_else(saved).map(|token| token.trim().to_owned()),
            offline: variable("HF_HUB_OFFLINE").is_some_and(yes),
            progress: false,
        }
    }
}

/// A client of the Hugging Face Hub. It gives local folders, which every reader takes as any other folder.
///
/// The cache has the layout of `huggingface_hub`, and contents that it has are linked, not downloaded. A download that
/// was cut off goes on where it ended. Sizes are checked, and so are the SHA-256 of large files. Of many ranks on one
/// cache, one calls it; the others wait at a barrier, and then read the same folder [offline](HubOptions::offline).
///
/// ```no_run
/// use models::{Decoder, Hub, HubOptions, Pretrained};
/// # fn main() -> numcore::Result<()> {
/// let folder = Hub::new(HubOptions::default()).folder("Qwen/Qwen2.5-0.5B", "main")?;
/// let model = Decoder::from_pretrained(folder, &nn::Init::new(&runtime_cpu::Cpu::new(), 0))?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
pub struct Hub {
    options: HubOptions,
}

impl Hub {
    /// A client with these options; nothing is sent yet.
    pub fn new(options: HubOptions) -> Self {
        Hub { options }
    }

    /// The folder with the files of a model that [`from_pretrained`](crate::Pretrained::from_pretrained) and tokenizers
    /// read: configurations, vocabularies, templates, and weights in safetensors, or else as pickles. The revision is a
    /// branch, a tag or a commit. All files are of one commit, and those that are missing in the cache are downloaded.
    ///
    /// # Errors
    /// Fails if the repository, its revision or a file cannot be had; offline, if the cache does not hold the snapshot.
    pub fn folder(&self, repository: &str, revision: &str) -> Result<PathBuf> {
        let asked = Asked { repository, revision };
        asked.check()?;
        if self.options.offline {
            let folder = self.cached(&asked)?;
            let entries = fs::read_dir(&folder).map_err(|error| Error::io(&folder, error))?;
            let all: Vec<String> = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
            if wanted(&all.iter().map(String::as_str).collect::<Vec<_>>()).is_empty() {
                let why = "is in the cache without the files of a model: download them without HF_HUB_OFFLINE";
                return Err(asked.refused(why));
            }
            return Ok(folder);
        }
        let (commit, all) = self.listed(&asked)?;
        let wanted = wanted(&all.iter().map(String::as_str).collect::<Vec<_>>());
        if wanted.is_empty() {
            return Err(asked.refused("has no file that a model is read from; `Hub::file` gets a file by name"));
        }
        self.download(&asked, &commit, &wanted)
    }

    /// The path of one file, by its name in the repository: a GGUF or ONNX file.
    ///
    /// # Errors
    /// Fails as [`folder`](Hub::folder) does.
    pub fn file(&self, repository: &str, revision: &str, file: &str) -> Result<PathBuf> {
        let asked = Asked { repository, revision };
        asked.check()?;
        if !is_within(file) {
            return Err(asked.refused(&format!("cannot hold `{file}`, which lies outside of it")));
        }
        if self.options.offline {
            let path = self.cached(&asked)?.join(file);
            let missing =
                || asked.refused(&format!("is in the cache without `{file}`: download it without HF_HUB_OFFLINE"));
            return if path.exists() { Ok(path) } else { Err(missing()) };
        }
        let (commit, all) = self.listed(&asked)?;
        if !all.iter().any(|name| name == file) {
            return Err(asked.refused(&format!("has no file `{file}`")));
        }
        Ok(self.download(&asked, &commit, &[file])?.join(file))
    }

    /// The commit of the revision, and the names of its files.
    fn listed(&self, asked: &Asked<'_>) -> Result<(String, Vec<String>)> {
        let path = format!("api/models/{}/revision/{}", asked.repository, asked.revision.replace('/', "%2F"));
        let text = HubClient::new(&self.options).text(&path);
        let list = text.and_then(|text| serde_json::from_str::<Value>(&text).map_err(|error| error.to_string()));
        let list = list.map_err(|why| asked.failed("the list of files", &why))?;
        let commit = list["sha"].as_str().unwrap_or_default().to_owned();
        if !is_commit(&commit) {
            return Err(asked.refused(&format!("is said to be of the commit `{commit}`: is HF_ENDPOINT right?")));
        }
        let name = |file: &Value| file["rfilename"].as_str().map(str::to_owned);
        Ok((commit, list["siblings"].as_array().into_iter().flatten().filter_map(name).collect()))
    }

    /// Downloads files of a commit that are not in the cache, and notes the commit as that of the revision.
    fn download(&self, asked: &Asked<'_>, commit: &str, files: &[&str]) -> Result<PathBuf> {
        let (client, snapshot) = (HubClient::new(&self.options), self.snapshot(asked, commit));
        let blobs = self.repository(asked).join("blobs");
        for file in files {
            let at = snapshot.join(file);
            if at.exists() {
                continue;
            }
            let failed = |why: String| asked.failed(&format!("`{file}`"), &why);
            let path = format!("{}/resolve/{commit}/{}", asked.repository, escaped(file));
            let stated = client.statement(&path, commit).map_err(failed)?;
            let blob = blobs.join(&stated.etag);
            if !holds(&blob, stated.size) {
                fs::create_dir_all(&blobs).map_err(|error| Error::io(&blobs, error))?;
                client.download(&path, &stated, &blob).map_err(failed)?;
            }
            link(&blob, &at, file).map_err(|error| Error::io(&at, error))?;
        }
        // Last, so that a snapshot that a name stands for has all of its files.
        let note = self.repository(asked).join("refs").join(asked.revision);
        let noted = fs::create_dir_all(note.parent().unwrap_or(&note)).and_then(|()| fs::write(&note, commit));
        noted.map_err(|error| Error::io(note, error))?;
        Ok(snapshot)
    }

    /// The folder of a repository in the cache.
    fn repository(&self, asked: &Asked<'_>) -> PathBuf {
        self.options.cache.join(format!("models--{}", asked.repository.replace('/', "--")))
    }

    fn snapshot(&self, asked: &Asked<'_>, commit: &str) -> PathBuf {
        self.repository(asked).join("snapshots").join(commit)
    }

    /// The folder of a snapshot in the cache.
    fn cached(&self, asked: &Asked<'_>) -> Result<PathBuf> {
        let note = self.repository(asked).join("refs").join(asked.revision);
        let commit = match fs::read_to_string(&note) {
            Ok(commit) => commit.trim().to_owned(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => asked.revision.to_owned(),
            Err(error) => return Err(Error::io(note, error)),
        };
        let folder = self.snapshot(asked, &commit);
        if is_commit(&commit) && folder.is_dir() {
            return Ok(folder);
        }
        let cache = self.options.cache.display();
        Err(asked.refused(&format!("is not in the cache {cache}: download it once without HF_HUB_OFFLINE")))
    }
}

/// A repository and a revision, for errors.
struct Asked<'a> {
    repository: &'a str,
    revision: &'a str,
}

impl Asked<'_> {
    /// Checks that the names are ones that the Hub has, and parts of paths.
    fn check(&self) -> Result<()> {
        let good =
            |part: &str| !part.is_empty() && part.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c));
        let parts = self.repository.split('/').count();
        if !(1..=2).contains(&parts) || !self.repository.split('/').all(good) || !is_within(self.repository) {
            let why = format!("`{}` is no repository: name it as `Qwen/Qwen2.5-0.5B`", self.repository);
            return Err(Error::argument("Hub", why));
        }
        if !is_within(self.revision) || !self.revision.split('/').all(good) {
            let why = format!("`{}` is no revision: name a branch, a tag or a commit, as `main`", self.revision);
            return Err(Error::argument("Hub", why));
        }
        Ok(())
    }

    fn refused(&self, why: &str) -> Error {
        Error::state(format!("{} at {}", self.repository, self.revision), why)
    }

    fn failed(&self, what: &str, why: &str) -> Error {
        let advice = "check the name, the network and HF_TOKEN; with HF_HUB_OFFLINE=1 the cache alone is read";
        self.refused(&format!("does not give {what}: {why}; {advice}"))
    }
}

/// A file's name in an address.
fn escaped(name: &str) -> String {
    let plain = |c: u8| c.is_ascii_alphanumeric() || b"-._~/".contains(&c);
    name.bytes().map(|c| if plain(c) { char::from(c).to_string() } else { format!("%{c:02X}") }).collect()
}

/// Links a file of a snapshot to its contents, in place of a link to contents that are gone.
fn link(blob: &Path, at: &Path, file: &str) -> io::Result<()> {
    fs::create_dir_all(at.parent().unwrap_or(at))?;
    if at.is_symlink() {
        fs::remove_file(at)?;
    }
    #[cfg(unix)]
    {
        let up = "../".repeat(1 + Path::new(file).components().count());
        let name = blob.file_name().unwrap_or_default();
        std::os::unix::fs::symlink(Path::new(&up).join("blobs").join(name), at)
    }
    #[cfg(not(unix))]
    fs::copy(blob, at).map(drop)
}

/// Tells whether a name is a path inside the folder that it is joined to.
fn is_within(name: &str) -> bool {
    !name.is_empty() && Path::new(name).components().all(|part| matches!(part, Component::Normal(_)))
}

fn is_commit(name: &str) -> bool {
    name.len() >= 7 && name.chars().all(|c| c.is_ascii_hexdigit())
}

/// The files that a model is read from: texts, and weights in the first of the formats that the repository has.
fn wanted<'a>(all: &[&'a str]) -> Vec<&'a str> {
    const OTHERS: [&str; 6] = ["onnx/", "openvino/", "original/", "coreml/", "metal/", "runs/"];
    let own = |file: &&str| is_within(file) && !OTHERS.iter().any(|other| file.starts_with(other));
    let files: Vec<&str> = all.iter().copied().filter(own).collect();
    let of = |starts: &[&str], endings: &[&str]| -> Vec<&'a str> {
        let name = |file: &'a str| file.rsplit('/').next().unwrap_or(file);
        let fits = |name: &str| starts.iter().any(|s| name.starts_with(s)) && endings.iter().any(|e| name.ends_with(e));
        files.iter().copied().filter(|file| fits(name(file))).collect()
    };
    let tensors = of(&["model", "adapter_model"], &[".safetensors"]);
    let pickles = of(&["pytorch_model", "adapter_model"], &[".bin"]);
    let texts = of(&[""], &[".json", ".jinja", ".txt", ".model"]);
    [texts, if tensors.is_empty() { pickles } else { tensors }].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_those_of_a_model() {
        let all = [
            ".gitattributes",
            "README.md",
            "config.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "consolidated.safetensors",
            "pytorch_model.bin",
            "onnx/config.json",
            "1_Pooling/config.json",
            "additional_chat_templates/tool_use.jinja",
            "../../outside.json",
            "merges.txt",
            "model.gguf",
        ];
        let due = [
            "config.json",
            "model.safetensors.index.json",
            "1_Pooling/config.json",
            "additional_chat_templates/tool_use.jinja",
            "merges.txt",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
        ];
        assert_eq!(wanted(&all), due);
        let old = ["config.json", "pytorch_model-00001-of-00001.bin", "training_args.bin", "flax_model.msgpack"];
        assert_eq!(wanted(&old), ["config.json", "pytorch_model-00001-of-00001.bin"]);
    }
}

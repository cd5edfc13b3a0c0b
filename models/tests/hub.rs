//! The Hub's client against a server in this process that answers as the Hub does, and against a cache.
#![cfg(feature = "hub")]

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

use models::{Decoder, Hub, HubOptions, Pretrained};
use nn::{Init, ModuleExt};
use runtime_cpu::Cpu;

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// A server of one repository, `team/llama`, whose branch `main` is a folder.
struct Server {
    address: String,
    /// The paths that were asked for.
    asked: Arc<Mutex<Vec<String>>>,
}

impl Server {
    fn new(folder: PathBuf) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (address, asked) = (listener.local_addr().unwrap(), Arc::new(Mutex::new(Vec::new())));
        let noted = asked.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (folder, noted) = (folder.clone(), noted.clone());
                std::thread::spawn(move || while answer(stream.as_ref().unwrap(), &folder, &noted).is_some() {});
            }
        });
        Server { address: format!("http://{address}"), asked }
    }

    fn hub(&self, cache: &Path) -> Hub {
        Hub::new(HubOptions {
            endpoint: self.address.clone(),
            cache: cache.into(),
            token: Some("secret".into()),
            offline: false,
            progress: false,
        })
    }

    fn asked(&self) -> Vec<String> {
        std::mem::take(&mut *self.asked.lock().unwrap())
    }
}

/// Answers one request; none if the connection is closed.
fn answer(mut stream: &TcpStream, folder: &Path, noted: &Mutex<Vec<String>>) -> Option<()> {
    let mut lines = BufReader::new(stream).lines();
    let first = lines.next()?.ok()?;
    let path = first.split(' ').nth(1)?.to_owned();
    let headers: Vec<String> = lines.map_while(Result::ok).take_while(|line| !line.is_empty()).collect();
    let header = |name: &str| headers.iter().find_map(|line| line.to_lowercase().strip_prefix(name).map(str::to_owned));
    noted.lock().unwrap().push(path.clone());
    let listing = "/api/models/team/llama/revision/main";
    let resolved = format!("/team/llama/resolve/{COMMIT}/");
    let (status, extra, body) = if header("authorization: ").as_deref() != Some("bearer secret") {
        ("401 Unauthorized", String::new(), Vec::new())
    } else if path == listing {
        let names = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let names: Vec<String> = names.map(|name| format!("{{\"rfilename\": \"{name}\"}}")).collect();
        let body = format!("{{\"sha\": \"{COMMIT}\", \"siblings\": [{}]}}", names.join(", "));
        ("200 OK", "Content-Type: application/json\r\n".into(), body.into_bytes())
    } else if let Some(name) = path.strip_prefix(&resolved) {
        let bytes = fs::read(folder.join(name)).unwrap();
        let range = header("range: bytes=")?;
        let (from, to) = range.split_once('-')?;
        let from: usize = from.parse().ok()?;
        let end = to.parse::<usize>().map_or(bytes.len(), |to| (to + 1).min(bytes.len()));
        let part = bytes[from.min(end)..end].to_vec();
        let extra = format!(
            "ETag: \"etag-{name}\"\r\nX-Repo-Commit: {COMMIT}\r\nContent-Range: bytes {from}-{}/{}\r\n",
            end.saturating_sub(1),
            bytes.len()
        );
        ("206 Partial Content", extra, part)
    } else {
        ("404 Not Found", String::new(), Vec::new())
    };
    write!(stream, "HTTP/1.1 {status}\r\nContent-Length: {}\r\n{extra}\r\n", body.len()).ok()?;
    stream.write_all(&body).ok()
}

fn reference(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("references").join(name)
}

/// A folder that is removed at the end.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("weftgrad-hub-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        Scratch(folder)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn a_folder_is_downloaded_once_and_then_read_offline() {
    let (server, cache) = (Server::new(reference("llama")), Scratch::new("folder"));
    let hub = server.hub(&cache.0);
    let folder = hub.folder("team/llama", "main").unwrap();
    assert!(folder.ends_with(format!("models--team--llama/snapshots/{COMMIT}")));
    let read = |path: &Path| {
        let model = Decoder::from_pretrained(path, &Init::new(&Cpu::with_threads(1), 0)).unwrap();
        model.state_dict().unwrap().iter().map(|(_, x)| x.to_bytes().unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(read(&folder), read(&reference("llama")));
    assert!(!folder.join("reference.safetensors").exists(), "no file but those of a model");
    // The second time the list of files alone is asked for, to see whether the branch has moved.
    server.asked();
    assert_eq!(hub.folder("team/llama", "main").unwrap(), folder);
    assert_eq!(server.asked(), ["/api/models/team/llama/revision/main"]);
    let offline = Hub::new(HubOptions {
        endpoint: "http://127.0.0.1:9".into(),
        cache: cache.0.clone(),
        token: None,
        offline: true,
        progress: false,
    });
    for revision in ["main", COMMIT] {
        assert_eq!(offline.folder("team/llama", revision).unwrap(), folder);
        assert_eq!(offline.file("team/llama", revision, "config.json").unwrap(), folder.join("config.json"));
    }
    for (repository, revision, due) in [
        ("team/llama", "next", "team/llama at next`: is not in the cache"),
        ("team/gpt2", "main", "HF_HUB_OFFLINE"),
        ("../../llama", "main", "is no repository"),
        ("team/llama", "../../../snapshots", "is no revision"),
    ] {
        let error = offline.folder(repository, revision).unwrap_err().to_string();
        assert!(error.contains(due), "{error}");
    }
    let error = offline.file("team/llama", "main", "model.gguf").unwrap_err().to_string();
    assert!(error.contains("without `model.gguf`"), "{error}");
}

#[test]
fn one_file_is_had_by_its_name() {
    let (server, cache) = (Server::new(reference("gguf")), Scratch::new("file"));
    let path = server.hub(&cache.0).file("team/llama", "main", "llama-f16.gguf").unwrap();
    assert_eq!(fs::read(&path).unwrap(), fs::read(reference("gguf/llama-f16.gguf")).unwrap());
    assert_eq!(server.asked().iter().filter(|path| path.contains("resolve")).count(), 2, "its size, and its bytes");
    let error = server.hub(&cache.0).file("team/llama", "main", "other.gguf").unwrap_err().to_string();
    assert!(error.contains("team/llama at main") && error.contains("has no file `other.gguf`"), "{error}");
    let error = server.hub(&cache.0).file("team/llama", "main", "../a").unwrap_err().to_string();
    assert!(error.contains("outside of it"), "{error}");
}

#[test]
fn what_the_server_refuses_is_an_error_with_advice() {
    let (server, cache) = (Server::new(reference("llama")), Scratch::new("refused"));
    let error = server.hub(&cache.0).folder("team/other", "main").unwrap_err().to_string();
    assert!(error.contains("team/other at main") && error.contains("404") && error.contains("HF_TOKEN"), "{error}");
    let without = Hub::new(HubOptions {
        endpoint: server.address.clone(),
        cache: cache.0.clone(),
        token: None,
        offline: false,
        progress: false,
    });
    let error = without.folder("team/llama", "main").unwrap_err().to_string();
    assert!(error.contains("401"), "{error}");
}

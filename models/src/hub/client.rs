//! Requests to the Hub, and files that are downloaded whole or not at all.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read, Seek, Write},
    path::Path,
    thread,
    time::Duration,
};

use sha2::{Digest, Sha256};
use ureq::{
    Agent, Body, RequestExt,
    http::{HeaderMap, Method, Request, Response, StatusCode, Uri},
};

use super::HubOptions;

/// The longest wait for a connection, an answer, and any part of it.
const PATIENCE: Duration = Duration::from_secs(60);
/// Delays before the retries of a request.
const WAITS: [Duration; 3] = [Duration::from_millis(200), Duration::from_secs(1), Duration::from_secs(5)];
/// The redirects of one request.
const REDIRECTS: usize = 10;
/// The longest list of files, in bytes.
const LONGEST_LIST: u64 = 256 << 20;

/// The reason of a failed request, and whether a retry may succeed.
pub(super) struct Refusal {
    why: String,
    passing: bool,
}

type Answer<T> = Result<T, Refusal>;

fn refused<T>(why: impl Into<String>) -> Answer<T> {
    Err(Refusal { why: why.into(), passing: false })
}

impl From<ureq::Error> for Refusal {
    fn from(error: ureq::Error) -> Self {
        Refusal { why: error.to_string(), passing: true }
    }
}

/// The server's statements on a file.
pub(super) struct FileStatement {
    /// The name of the contents: for large files their SHA-256.
    pub(super) etag: String,
    pub(super) size: u64,
}

/// Connections to one endpoint.
pub(super) struct HubClient<'a> {
    agent: Agent,
    options: &'a HubOptions,
}

impl<'a> HubClient<'a> {
    pub(super) fn new(options: &'a HubOptions) -> Self {
        let config = Agent::config_builder().max_redirects(0).http_status_as_error(false);
        let config = config.timeout_resolve(Some(PATIENCE)).timeout_connect(Some(PATIENCE));
        let config = config.timeout_recv_response(Some(PATIENCE)).timeout_per_read(Some(PATIENCE));
        HubClient { agent: config.build().into(), options }
    }

    /// The text at a path of the endpoint.
    pub(super) fn text(&self, path: &str) -> Result<String, String> {
        again(|| {
            let mut response = succeeded(self.send(Method::GET, &self.address(path), 0, false)?)?;
            Ok(response.body_mut().with_config().limit(LONGEST_LIST).read_to_string()?)
        })
    }

    /// The statement on a file of this commit.
    pub(super) fn statement(&self, path: &str, commit: &str) -> Result<FileStatement, String> {
        again(|| {
            let response = self.send(Method::HEAD, &self.address(path), 0, false)?;
            let moved = response.status().is_redirection();
            let response = if moved { response } else { succeeded(response)? };
            let headers = response.headers();
            let own = header(headers, "x-repo-commit").unwrap_or_default();
            if own != commit {
                return refused(format!("it is of the commit `{own}`, and `{commit}` was asked for"));
            }
            let etag = header(headers, "x-linked-etag").or_else(|| header(headers, "etag")).unwrap_or_default();
            let etag = etag.strip_prefix("W/").unwrap_or(etag).trim_matches('"');
            if etag.is_empty() || !etag.bytes().all(|c| c.is_ascii_alphanumeric() || c == b'-') {
                return refused(format!("its ETag `{etag}` is no name of a file"));
            }
            let length = header(headers, "content-length").filter(|_| !moved);
            let size = header(headers, "x-linked-size").or(length).and_then(|size| size.parse().ok());
            let Some(size) = size else { return refused("its size is not stated") };
            Ok(FileStatement { etag: etag.to_owned(), size })
        })
    }

    /// Downloads a file to a path, on from what an earlier call left beside it. Processes wait for each other.
    pub(super) fn download(&self, path: &str, stated: &FileStatement, to: &Path) -> Result<(), String> {
        let part = to.with_extension("part");
        let open = OpenOptions::new().read(true).append(true).create(true).open(&part);
        let locked = open.and_then(|file| file.lock().map(|()| file));
        let mut file = locked.map_err(|error| format!("`{}` cannot be written: {error}", part.display()))?;
        if holds(to, stated.size) {
            return Ok(());
        }
        again(|| self.complete(path, stated, &mut file))?;
        fs::rename(&part, to).map_err(|error| format!("`{}` cannot be renamed: {error}", part.display()))
    }

    /// Appends the bytes that a part lacks, and checks all. A part that is wrong is emptied.
    fn complete(&self, path: &str, stated: &FileStatement, file: &mut File) -> Answer<()> {
        let disk = |error: io::Error| Refusal { why: format!("the file cannot be written: {error}"), passing: false };
        let mut have = file.metadata().map_err(disk)?.len();
        if have > stated.size {
            (_, have) = (file.set_len(0).map_err(disk)?, 0);
        }
        if have < stated.size {
            let response = succeeded(self.send(Method::GET, &self.address(path), have, true)?)?;
            let from = format!("bytes {have}-");
            let goes_on = response.status() == StatusCode::PARTIAL_CONTENT
                && header(response.headers(), "content-range").is_some_and(|range| range.starts_with(&from));
            if !goes_on {
                // The server sends the file from its start.
                (_, have) = (file.set_len(0).map_err(disk)?, 0);
            }
            // One byte more tells that the file is longer than stated.
            let mut body = response.into_body().into_reader().take(stated.size - have + 1);
            let mut bytes = vec![0; 1 << 20];
            loop {
                let read = body.read(&mut bytes);
                let n = read.map_err(|error| Refusal { why: format!("after {have} bytes: {error}"), passing: true })?;
                if n == 0 {
                    break;
                }
                file.write_all(&bytes[..n]).map_err(disk)?;
                have += n as u64;
                if self.options.progress {
                    eprint!("\r{path}: {} of {} MB ", have / 1_000_000, stated.size / 1_000_000);
                }
            }
            if self.options.progress {
                eprintln!();
            }
        }
        if have < stated.size {
            return Err(Refusal { why: format!("{have} of {} bytes came", stated.size), passing: true });
        }
        let hashed = stated.etag.len() == 64 && stated.etag.bytes().all(|c| c.is_ascii_hexdigit());
        let right = have == stated.size && (!hashed || digest(file).map_err(disk)?.eq_ignore_ascii_case(&stated.etag));
        if right {
            return file.sync_all().map_err(disk);
        }
        file.set_len(0).map_err(disk)?;
        Err(Refusal { why: format!("its bytes are not those of `{}`", stated.etag), passing: true })
    }

    fn address(&self, path: &str) -> String {
        format!("{}/{path}", self.options.endpoint.trim_end_matches('/'))
    }

    /// Sends a request, and follows redirects: those to other hosts only if `away`, and without the token.
    fn send(&self, method: Method, address: &str, from: u64, away: bool) -> Answer<Response<Body>> {
        let bad = |address: &str| format!("`{address}` is no address: is HF_ENDPOINT right?");
        let parsed = |address: &str| address.parse::<Uri>().or_else(|_| refused(bad(address)));
        let home = origin(&parsed(&self.options.endpoint)?);
        let mut at = parsed(address)?;
        for _ in 0..REDIRECTS {
            let mut request = Request::builder().method(method.clone()).uri(&at).header("accept-encoding", "identity");
            if let Some(token) = self.options.token.as_ref().filter(|_| origin(&at) == home) {
                request = request.header("authorization", format!("Bearer {token}"));
            }
            if from > 0 {
                request = request.header("range", format!("bytes={from}-"));
            }
            let request = request.body(()).or_else(|error| refused(error.to_string()))?;
            let response = request.with_agent(&self.agent).run()?;
            if !response.status().is_redirection() {
                return Ok(response);
            }
            let Some(location) = header(response.headers(), "location") else {
                return refused("a redirect to nowhere");
            };
            let (scheme, host) = (at.scheme_str().unwrap_or_default(), at.authority().map_or("", |host| host.as_str()));
            let next = match location {
                _ if location.starts_with("//") => parsed(&format!("{scheme}:{location}"))?,
                _ if location.starts_with('/') => parsed(&format!("{scheme}://{host}{location}"))?,
                _ => parsed(location)?,
            };
            if origin(&next) != origin(&at) && !away {
                return Ok(response);
            }
            if scheme == "https" && next.scheme_str() != Some("https") {
                return refused(format!("a redirect to `{next}`, which is not encrypted"));
            }
            at = next;
        }
        refused(format!("more than {REDIRECTS} redirects"))
    }
}

/// Tells whether a path has a file of this size.
pub(super) fn holds(path: &Path, size: u64) -> bool {
    fs::metadata(path).is_ok_and(|file| file.is_file() && file.len() == size)
}

/// Scheme, host and port: the token is for these alone.
fn origin(address: &Uri) -> (String, String, Option<u16>) {
    let lower = |part: Option<&str>| part.unwrap_or_default().to_ascii_lowercase();
    (lower(address.scheme_str()), lower(address.host()), address.port_u16())
}

fn header<'h>(headers: &'h HeaderMap, name: &str) -> Option<&'h str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

fn succeeded(response: Response<Body>) -> Answer<Response<Body>> {
    let status = response.status();
    if status.is_success() {
        return Ok(response);
    }
    let passing = status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS;
    Err(Refusal { why: format!("the answer is {status}"), passing })
}

/// Retries a request after transient failures.
fn again<T>(mut request: impl FnMut() -> Answer<T>) -> Result<T, String> {
    for wait in WAITS {
        match request() {
            Err(Refusal { passing: true, .. }) => thread::sleep(wait),
            other => return other.map_err(|refusal| refusal.why),
        }
    }
    request().map_err(|refusal| refusal.why)
}

/// The SHA-256 of a file, in hexadecimal digits.
fn digest(file: &mut File) -> io::Result<String> {
    file.rewind()?;
    let (mut hash, mut bytes) = (Sha256::new(), vec![0; 1 << 20]);
    loop {
        match file.read(&mut bytes)? {
            0 => break,
            n => hash.update(&bytes[..n]),
        }
    }
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

//! The page and its state over HTTP: to callers on this machine, and to those from elsewhere who
//! have the token. Nothing can be changed by it.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::{Request, State};
use axum::http::header::{
    AUTHORIZATION, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HOST, X_CONTENT_TYPE_OPTIONS,
};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use fanin_limits::{Peer, limited};
use fanin_udp::NotInherited;
use tokio::sync::oneshot;
use tonic::service::Routes;
use tonic::transport::server::{TcpConnectInfo, TcpIncoming};

use super::watch::Watch;

/// What is answered, to whoever asks in the clear.
pub(crate) const PATHS: [&str; 4] = ["/", "/page.js", "/page.css", "/page/state"];

/// Nothing comes from elsewhere, and nobody shows the page inside another one.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Built from `page/` (`build.rs`).
const INDEX: &str = include_str!(concat!(env!("OUT_DIR"), "/index.html"));
const SCRIPT: &str = include_str!(concat!(env!("OUT_DIR"), "/page.js"));
const STYLE: &str = include_str!(concat!(env!("OUT_DIR"), "/page.css"));

/// Connections at once, and those from one address.
const CONNECTIONS_MAX: usize = 128;
const CONNECTIONS_OF_ONE_MAX: usize = 32;
/// How long the page of a job that was here before may take to go.
const PREDECESSOR: Duration = Duration::from_secs(1);
/// How long open connections may take to end.
const HANG_UP: Duration = Duration::from_millis(500);
/// Shorter ones could be guessed.
const TOKEN_BYTES_MIN: usize = 16;

/// Why a page is not served.
#[derive(Debug, thiserror::Error)]
pub enum PageError {
    /// The address cannot be listened on.
    #[error("cannot serve the page at {address}: {cause}; take another port")]
    Bind {
        /// The address.
        address: SocketAddr,
        /// The operating system's answer.
        cause: io::Error,
    },
    /// Others could read it.
    #[error(
        "the page at {0} would be for everybody who reaches that address: name a file with a token (--token-file, \
         FANIN_PAGE_TOKEN_FILE), or listen on 127.0.0.1 and come by ssh -L"
    )]
    NoToken(SocketAddr),
    /// The file has no token.
    #[error("{file}: {cause}", file = .file.display())]
    Token {
        /// The file.
        file: PathBuf,
        /// What is wrong.
        cause: String,
    },
    /// The operating system gave no threads.
    #[error("cannot start the page's threads: {0}")]
    Runtime(io::Error),
}

/// What callers from other machines must show.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Token(&'static str);

impl Token {
    /// The first line of a file.
    ///
    /// # Errors
    /// When there is no such file, or its first line is short.
    pub fn of_file(file: &Path) -> Result<Self, PageError> {
        let wrong = |cause: String| PageError::Token { file: file.into(), cause };
        let text = std::fs::read_to_string(file).map_err(|error| wrong(error.to_string()))?;
        let token = text.lines().next().unwrap_or_default().trim().to_owned();
        let is_plain = token.bytes().all(|byte| byte.is_ascii_graphic());
        if token.len() < TOKEN_BYTES_MIN || !is_plain {
            return Err(wrong(format!(
                "its first line is to be a token of {TOKEN_BYTES_MIN} letters and digits or more; openssl rand -hex 16 makes one"
            )));
        }
        /// This process's tokens, which live as long as it does: each of its sessions reads one.
        static TOKENS: Mutex<Vec<&'static str>> = Mutex::new(Vec::new());
        let mut tokens = TOKENS.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = tokens.iter().find(|known| **known == token) {
            return Ok(Self(known));
        }
        tokens.push(token.leak());
        Ok(Self(tokens[tokens.len() - 1]))
    }

    /// Takes as long whichever byte is wrong.
    fn is(&self, shown: &str) -> bool {
        let differ = self.0.bytes().zip(shown.bytes()).fold(0, |differ, (one, other)| differ | (one ^ other));
        self.0.len() == shown.len() && differ == 0
    }
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(..)")
    }
}

/// The answers to [`PATHS`].
pub(crate) fn answers(watch: Watch, token: Option<Token>) -> Router {
    let file = |text: &'static str, kind: &'static str| {
        get(async move || (headers(kind, "no-cache"), text).into_response())
    };
    Router::new()
        .route("/", file(INDEX, "text/html; charset=utf-8"))
        .route("/page.js", file(SCRIPT, "text/javascript; charset=utf-8"))
        .route("/page.css", file(STYLE, "text/css; charset=utf-8"))
        .route("/page/state", get(state))
        .with_state((watch, token))
}

fn headers(kind: &'static str, cache: &'static str) -> impl axum::response::IntoResponseParts {
    [
        (CONTENT_TYPE, kind),
        (CACHE_CONTROL, cache),
        (CONTENT_SECURITY_POLICY, POLICY),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
    ]
}

async fn state(State((watch, token)): State<(Watch, Option<Token>)>, request: Request) -> Response {
    let peer = request.extensions().get::<TcpConnectInfo>().cloned();
    let peer = peer.or_else(|| request.extensions().get().map(|peer: &Peer| peer.connection.clone()));
    let ends = peer.and_then(|peer| Some((peer.remote_addr()?.ip(), peer.local_addr()?.ip())));
    let is_here = ends.is_some_and(|(from, to)| from == to || from.to_canonical().is_loopback());
    if let Err(refusal) = may_look(is_here, request.headers(), token.as_ref()) {
        return refusal.into_response();
    }
    if let Some(since) = watch.stale() {
        let text = format!("nothing is known of the services since {} s\n", since.as_secs());
        return (StatusCode::SERVICE_UNAVAILABLE, text).into_response();
    }
    let query = request.uri().query().unwrap_or_default();
    let since = query.split('&').find_map(|pair| pair.strip_prefix("since="));
    let since = since.and_then(|since| since.parse::<f64>().ok()).filter(|since| since.is_finite());
    match serde_json::to_string(&watch.state(since.unwrap_or(0.0))) {
        Ok(text) => (headers("application/json", "no-store"), text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

/// Whether somebody may: from this machine, or with the token.
fn may_look(
    is_here: bool,
    headers: &HeaderMap,
    token: Option<&Token>,
) -> Result<(), (StatusCode, &'static str)> {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
    let shown = text(AUTHORIZATION).and_then(|text| text.strip_prefix("Bearer "));
    if token.zip(shown).is_some_and(|(token, shown)| token.is(shown)) {
        return Ok(());
    }
    match token {
        // A browser that was led here by a name of somebody else says so.
        _ if is_here && text(HOST).is_none_or(names_this_machine) => Ok(()),
        _ if is_here => {
            Err((StatusCode::FORBIDDEN, "the page is at 127.0.0.1 or localhost, and at no other name\n"))
        }
        Some(_) => {
            Err((StatusCode::UNAUTHORIZED, "the token is missing or wrong: add #token=... to the address\n"))
        }
        None => Err((
            StatusCode::FORBIDDEN,
            "the page is for callers on its own machine: come by ssh -L PORT:ADDR:PORT, where ADDR is the service's own, or start the service with a token \
             (FANIN_PAGE_TOKEN_FILE)\n",
        )),
    }
}

fn names_this_machine(host: &str) -> bool {
    let name = host.rsplit_once(':').filter(|(_, port)| port.bytes().all(|byte| byte.is_ascii_digit()));
    let name = name.map_or(host, |(name, _)| name);
    let address = name.trim_start_matches('[').trim_end_matches(']');
    name == "localhost" || address.parse::<IpAddr>().is_ok()
}

/// A page on a port of its own, until it is dropped.
#[derive(Debug)]
pub struct PageServer {
    address: SocketAddr,
    /// Whatever serves ends when this does.
    _stop: oneshot::Sender<()>,
}

impl PageServer {
    /// Serves what `watch` sees, whose services `asking` asks.
    ///
    /// # Errors
    /// When the port is taken, or others would reach it and there is no token.
    pub fn start(
        listen: SocketAddr,
        token: Option<Token>,
        (watch, asking): (Watch, impl Future<Output = ()> + Send + 'static),
    ) -> Result<Self, PageError> {
        if token.is_none() && !listen.ip().is_loopback() {
            return Err(PageError::NoToken(listen));
        }
        let failed = |cause| PageError::Bind { address: listen, cause };
        let listener = TcpListener::bind(listen).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let router = answers(watch, token);
        let (stop, stopped) = oneshot::channel::<()>();
        let (tell, told) = oneshot::channel::<()>();
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(PageError::Runtime)?;
        let serve = async move {
            let listener = match tokio::net::TcpListener::from_std(listener) {
                Ok(listener) => listener,
                Err(error) => return tracing::error!(%error, "the page is not served"),
            };
            tokio::spawn(asking);
            // A data loader that is forked from this process keeps no port.
            let _not_inherited = NotInherited::new(&listener);
            let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
            let incoming = limited(incoming, CONNECTIONS_MAX, CONNECTIONS_OF_ONE_MAX);
            let served = tonic::transport::Server::builder()
                .accept_http1(true)
                .add_routes(Routes::from(router))
                .serve_with_incoming_shutdown(incoming, async {
                    let _ = told.await;
                });
            let ends = async {
                let _ = stopped.await;
                drop(tell);
                tokio::time::sleep(HANG_UP).await;
            };
            tokio::select! {
                served = served => if let Err(error) = served {
                    tracing::error!(%error, "the page ended");
                },
                () = ends => {}
            }
        };
        std::thread::Builder::new()
            .name("fanin-page".into())
            .spawn(move || {
                runtime.block_on(serve);
                runtime.shutdown_background();
            })
            .map_err(PageError::Runtime)?;
        Ok(Self { address, _stop: stop })
    }

    /// The page of this process at an address, which its jobs share: started if it is not there.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub(crate) fn of_process<F: Future<Output = ()> + Send + 'static>(
        listen: SocketAddr,
        token: Option<Token>,
        watched: impl Fn() -> (Watch, F),
    ) -> Result<Arc<Self>, PageError> {
        /// By the process, too: one that was forked has no threads of the page.
        type Open = Vec<(u32, SocketAddr, Weak<PageServer>)>;
        static OPEN: Mutex<Open> = Mutex::new(Vec::new());
        let process = std::process::id();
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|(of, _, page)| *of == process && page.strong_count() > 0);
        if let Some(page) = open.iter().find_map(|(_, at, page)| page.upgrade().filter(|_| *at == listen)) {
            return Ok(page);
        }
        let until = Instant::now() + PREDECESSOR;
        let page = loop {
            match Self::start(listen, token, watched()) {
                Err(PageError::Bind { .. }) if Instant::now() < until => {
                    // Nothing tells when the port is free.
                    std::thread::sleep(PREDECESSOR / 10);
                }
                started => break Arc::new(started?),
            }
        };
        open.push((process, listen, Arc::downgrade(&page)));
        Ok(page)
    }

    /// Where it is.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn may(is_here: bool, host: &str, shown: Option<&str>, token: Option<Token>) -> Result<(), StatusCode> {
        let mut headers = HeaderMap::new();
        headers.insert(HOST, host.parse().unwrap());
        if let Some(shown) = shown {
            headers.insert(AUTHORIZATION, format!("Bearer {shown}").parse().unwrap());
        }
        may_look(is_here, &headers, token.as_ref()).map_err(|(status, _)| status)
    }

    #[test]
    fn callers_of_this_machine_look_and_others_with_the_token() {
        let token = Some(Token("0123456789abcdef"));
        let (forbidden, unauthorized) = (Err(StatusCode::FORBIDDEN), Err(StatusCode::UNAUTHORIZED));
        for host in ["localhost", "localhost:4800", "127.0.0.1:4800", "[::1]:4800", "[::1]"] {
            assert_eq!(may(true, host, None, None), Ok(()), "{host}");
            assert_eq!(may(true, host, None, token), Ok(()), "{host}");
        }
        assert_eq!(may(false, "10.0.0.9:4800", None, None), forbidden);
        assert_eq!(may(false, "10.0.0.9:4800", None, token), unauthorized);
        assert_eq!(may(false, "switch:4800", Some("0123456789abcdef"), token), Ok(()));
        for wrong in ["0123456789abcdeF", "0123456789abcde", "0123456789abcdef0", ""] {
            assert_eq!(may(false, "switch:4800", Some(wrong), token), unauthorized, "{wrong}");
        }
        // A page of somebody else, under whose name a browser comes here.
        for token in [None, token] {
            assert_eq!(may(true, "evil.example:4800", None, token), forbidden);
        }
    }

    #[test]
    fn a_token_is_long_enough_and_in_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("token");
        let read = |text: &str| {
            std::fs::write(&file, text).unwrap();
            Token::of_file(&file).map_err(|error| error.to_string())
        };
        assert_eq!(read("0123456789abcdef\nnot this\n"), Ok(Token("0123456789abcdef")));
        for text in ["", "short", "\n0123456789abcdef", "0123456789 abcdef"] {
            assert!(read(text).is_err_and(|error| error.contains("openssl rand")), "{text:?}");
        }
        assert!(Token::of_file(&folder.path().join("none")).is_err());
    }

    #[test]
    fn a_page_for_everybody_is_refused_and_a_port_in_use_is_named() {
        let watched = || Watch::of_services("test".into(), Vec::new(), true, fanin_tls::Trust::default());
        let refused = PageServer::start(([0, 0, 0, 0], 0).into(), None, watched()).expect_err("no token");
        assert!(matches!(refused, PageError::NoToken(_)), "{refused}");
        let page = PageServer::start(([127, 0, 0, 1], 0).into(), None, watched()).expect("a free port");
        let taken = PageServer::start(page.address(), None, watched()).expect_err("it is in use");
        assert!(taken.to_string().contains(&page.address().to_string()), "{taken}");
    }
}

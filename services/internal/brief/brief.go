// Package brief bounds texts that come from elsewhere, such as what a program wrote before it
// failed, and that travel in errors: an answer that is too long for its transport, or is no
// text at all, would not arrive, and whoever waits for it would wait in vain.
package brief

import (
	"fmt"
	"strings"
	"unicode/utf8"

	"google.golang.org/grpc/status"
)

// most is how many bytes of a text are kept.
const most = 8 << 10

// Text returns a text as valid UTF-8 and of bounded length: of a long one its beginning and its
// end.
func Text(s string) string {
	if len(s) > most {
		s = fmt.Sprintf("%s … (%d bytes left out) … %s", s[:most/2], len(s)-most, s[len(s)-most/2:])
	}
	return strings.ToValidUTF8(s, "\uFFFD")
}

// Status bounds the text of an error of gRPC. One that is too long loses its details, which may
// be as long; the code stays. Other errors stay as they are.
func Status(err error) error {
	st, ok := status.FromError(err)
	if !ok || len(st.Message()) <= most && utf8.ValidString(st.Message()) {
		return err
	}
	return status.Error(st.Code(), Text(st.Message()))
}

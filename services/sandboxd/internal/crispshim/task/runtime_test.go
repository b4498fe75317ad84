package task

import (
	"os"
	"path/filepath"
	"testing"
)

// What a runtime writes last as an error is what it said, in the forms that there are.
func TestLastErrorOfARuntime(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "log.json")
	for want, line := range map[string]string{
		"of runc":  `{"level":"error","msg":"of runc","time":"x"}`,
		"of youki": `{"timestamp":"x","level":"ERROR","fields":{"message":"of youki"},"target":"youki"}`,
		"earlier":  `{"level":"warning","msg":"none"}` + "\nno JSON\n" + `{"level":"error"}`,
	} {
		text := `{"level":"error","msg":"earlier"}` + "\n" + line + "\n" + `{"level":"info","msg":"after it"}` + "\n"
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if got := lastError(file, 0); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
